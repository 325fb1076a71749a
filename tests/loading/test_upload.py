"""Pieces of weights cover every byte once, and what the device holds is what the host's packing gives, however it came there."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.contracts.backend import Capabilities
from atlas_core.contracts.checkpoint import Extent
from atlas_core.contracts.ops import OperandSpec, Packed, Repack
from atlas_core.loading import ahead, upload
from atlas_core.loading.ahead import ReadAhead
from atlas_core.loading.extents import ExtentReader
from atlas_core.loading.pieces import Piece, Placed, loads, pieces
from atlas_core.loading.upload import load_weights
from atlas_core.runtime.loader import WeightCopy
from atlas_core.testing.host import HostBackend, HostKernels
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import BudgetError, CheckpointError, DeviceError
from atlas_core.vocab.layout import StorageLayout

LAYOUT = StorageLayout("pairs", 2, 3)
GROUP = 4


@dataclass(frozen=True)
class HostLaunch:
    """A launch that the host runs at once."""

    run: object
    description: str = "turns groups of rows"


class Turning:
    """Packs groups of four rows so that columns of bytes come first; zeros fill the last group."""

    op = name = "turning"
    kernels = ()

    def pack(self, packing, layout, shape, data):
        rows = np.frombuffer(data, np.uint8).reshape(-1, layout.row_bytes(shape[-1]))
        filled = np.zeros((-(-len(rows) // GROUP) * GROUP, rows.shape[1]), np.uint8)
        filled[: len(rows)] = rows
        return np.ascontiguousarray(filled.reshape(-1, GROUP, rows.shape[1]).transpose(0, 2, 1)).reshape(-1)

    def repack(self, packing, layout, shape):
        width = layout.row_bytes(shape[-1])

        def launch(backend, source, order, target, rows):
            def run():
                places = _array(order, 4 * rows).view(np.int32) if order else np.arange(rows)
                stored = _array(source, (int(places.max()) + 1) * width).reshape(-1, width)[places]
                packed = self.pack(packing, layout, (rows, shape[-1]), stored.tobytes())
                backend.view(target, packed.nbytes)[:] = packed.data

            return HostLaunch(run)

        return Repack(GROUP, GROUP * width, launch)


class Unpacking(Turning):
    """The same, by numpy alone."""

    repack = None


def _array(address, nbytes):
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class Device(HostBackend):
    """Runs launches where they are enqueued."""

    def __init__(self, *, unified=True, asynchronous=False, total_memory=1 << 24):
        super().__init__(HostKernels(), total_memory=total_memory)
        self.capabilities = Capabilities(asynchronous, False, unified)

    def enqueue(self, launch, stream):
        self._submit(stream, launch.run)


@dataclass
class Source:
    """Weights in one file, and by their own words."""

    path: object
    data: dict
    layouts: dict = field(default_factory=dict)
    whole: tuple = ()

    def read(self, weight):
        start, nbytes, order, width = self.data[weight]
        raw = self.path.read_bytes()[start : start + nbytes]
        if order is None:
            return raw
        return np.frombuffer(raw, np.uint8).reshape(-1, width)[np.asarray(order)].tobytes()

    def drawn(self, weight):
        return None

    def placed(self, weight):
        if weight in self.whole:
            return None
        start, nbytes, order, _ = self.data[weight]
        return Placed((Extent(self.path, start, nbytes),), order)


def copy_of(weight, rows, blocks, packing, implementation):
    spec = OperandSpec((rows, 2 * blocks), DType.U8, LAYOUT)
    groups = -(-rows // GROUP) * GROUP if packing == "turned" else rows
    return WeightCopy(weight, Packed(packing, groups * 3 * blocks), spec, implementation)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 60), blocks=st.integers(1, 5), most=st.integers(12, 200), packing=st.sampled_from(["turned", "stored:pairs"]),
    head=st.sampled_from([0, 4, 8]),
)  # fmt: skip
def test_pieces_cover_a_weight_once_in_whole_groups(rows, blocks, most, packing, head):
    copy = copy_of("w", rows, blocks, packing, Turning())
    order = None if not head or packing != "turned" else [r ^ (r % head == 0 and r + 1 < rows) for r in range(rows)]
    order = None if order is None or sorted(order) != list(range(rows)) else order
    cut = pieces(copy, Placed((Extent(Path("f"), 100, rows * 3 * blocks),), order), most, repacks=True)
    if cut is None:
        assert packing == "turned"  # a group of rows does not fit
        return
    assert [piece.offset for piece in cut] == [sum(p.nbytes for p in cut[:i]) for i in range(len(cut))]
    assert sum(piece.nbytes for piece in cut) == copy.packed.nbytes
    assert all(piece.extent.nbytes <= most for piece in cut)
    if packing == "turned":
        assert all(piece.rows % GROUP == 0 for piece in cut[:-1])
        assert sum(piece.rows for piece in cut) == rows
    else:
        assert cut[0].extent.start == 100
        assert all(a.extent.start + a.nbytes == b.extent.start for a, b in itertools.pairwise(cut))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400_000), st.integers(1, 900)), max_size=40),
    st.integers(900, 200_000),
)
def test_loads_hold_every_piece_once_and_are_not_too_long(places, most):
    copy = copy_of("w", 4, 1, "turned", Turning())
    cut = [Piece(copy, Extent(Path(f"f{file}"), start, nbytes), 0, nbytes) for file, start, nbytes in places]
    made = loads(cut, most)
    assert sorted(map(id, cut)) == sorted(id(piece) for load in made for piece in load.pieces)
    for load in made:
        assert load.extent.nbytes <= most
        for piece in load.pieces:
            assert piece.extent.path == load.extent.path
            assert load.extent.start <= piece.extent.start
            assert piece.extent.start + piece.extent.nbytes <= load.extent.start + load.extent.nbytes
    if len({file for file, _, _ in places}) == 1 and max(start + n for _, start, n in places) <= min(most, 60_000):
        assert len(made) == 1


@pytest.fixture
def source(tmp_path):
    data = np.random.default_rng(2).integers(0, 256, 200_000, dtype=np.uint8).tobytes()
    path = tmp_path / "weights"
    path.write_bytes(data)
    turned = [row ^ 1 for row in range(400)]
    return Source(
        path, {"a": (17, 300 * 30, None, 30), "b": (10_000, 400 * 300, turned, 300), "c": (150_001, 7 * 3, None, 3)}
    )


COPIES = {
    "streamed": lambda: [
        copy_of("a", 300, 10, "turned", Turning()), copy_of("a", 300, 10, "stored:pairs", Turning()),
        copy_of("b", 400, 100, "turned", Turning()), copy_of("c", 7, 1, "turned", Turning()),
    ],
    "packed on the host": lambda: [
        copy_of("a", 300, 10, "turned", Unpacking()), copy_of("a", 300, 10, "stored:pairs", Turning()),
        copy_of("b", 400, 100, "turned", Unpacking()), copy_of("c", 7, 1, "turned", Turning()),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("room", [None, 32])
def test_the_device_holds_what_the_host_packing_gives(source, kind, unified, asynchronous, room, monkeypatch):
    """``room``: of a head start that has read the beginning of the file, if there is one."""
    monkeypatch.setattr(ahead, "BLOCK", 10_000)
    monkeypatch.setattr(ExtentReader, "resident", lambda reader, extent: False)
    monkeypatch.setattr(upload._Shape, "of", lambda backend: upload._Shape(4096, 3, 2))
    device, told = Device(unified=unified, asynchronous=asynchronous), []
    copies = COPIES[kind]()
    head = ReadAhead([Extent(source.path, 0, source.path.stat().st_size)], room) if room else None
    memory = load_weights(device, copies, source, lambda done, total, weight: told.append((done, total)), head)
    if head:
        head.close()
    for copy in copies:
        buffer = memory.buffers[copy.weight, copy.packed.name]
        data = source.read(copy.weight)
        wanted = (
            data
            if copy.packed.name == "stored:pairs"
            else copy.implementation.pack("turned", LAYOUT, copy.spec.shape, data)
        )
        assert bytes(device.view(buffer.address, buffer.nbytes)) == bytes(memoryview(wanted).cast("B"))
    total = sum(copy.packed.nbytes for copy in copies)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    memory.free()
    assert device.memory() == (1 << 24, 1 << 24)


def test_a_cut_file_ends_the_load_and_gives_everything_back(source):
    source.data["b"] = (150_000, 400 * 300, None, 300)
    device = Device()
    with pytest.raises(CheckpointError, match="ended at byte"):
        load_weights(device, COPIES["streamed"](), source)
    assert device.memory() == (1 << 24, 1 << 24)


def test_a_device_that_fails_ends_the_load_and_gives_everything_back(source):
    class Broken(Device):
        def enqueue(self, launch, stream):
            raise DeviceError("the device is gone", "it fell off the bus")

    device = Broken()
    with pytest.raises(DeviceError, match="the device is gone"):
        load_weights(device, COPIES["streamed"](), source)
    assert device.memory() == (1 << 24, 1 << 24)
    assert not device._pinned


def test_no_room_is_said_before_anything_is_read(source):
    with pytest.raises(BudgetError):
        load_weights(Device(total_memory=1000), COPIES["streamed"](), source)
