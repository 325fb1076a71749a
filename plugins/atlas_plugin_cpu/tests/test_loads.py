"""Weights out of the page cache: read and packed by threads in one foreign call each, to the bytes of the numpy packing."""

import os
import threading

import numpy as np
import pytest

from atlas_core.contracts.backend import HostLoad, HostLoader, HostRooms, LoadState
from atlas_core.contracts.checkpoint import Extent
from atlas_core.contracts.ops import OperandSpec, Packed
from atlas_core.loading import resident
from atlas_core.loading.pieces import Placed
from atlas_core.loading.upload import begin_weights, load_weights
from atlas_core.runtime.loader import WeightCopy
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError, KernelError
from atlas_core.vocab.kernel import Geometry, f32, i32, i64, ptr
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_plugin_cpu.backend import open_backend
from atlas_plugin_cpu.implementations import implementations
from atlas_plugin_cpu.packing import MATRIX_LAYOUTS, matrix_packing, pack

BLOCKS = {
    "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q4_k": (256, 144), "q5_k": (256, 176),
    "q6_k": (256, 210), "iq4_xs": (256, 136),
}  # fmt: skip
LINEAR = next(each for each in implementations() if each.name == "cpu.linear")
ROWS, COLUMNS = 1000, 2048


@pytest.fixture(scope="module")
def backend(library):
    opened = open_backend(library, threads=1)
    yield opened
    opened.close()


class Source:
    """One weight for each layout, one behind another in a file."""

    def __init__(self, path, cut=0):
        self.path, self.places, self.specs, self.orders = path, {}, {}, {}
        rng, start = np.random.default_rng(3), 5
        for name in MATRIX_LAYOUTS:
            layout = StorageLayout(name, *BLOCKS[name]) if name in BLOCKS else plain(DType(name))
            self.specs[name] = OperandSpec((ROWS, COLUMNS), DType.U8, layout)
            self.places[name] = start, layout.nbytes((ROWS, COLUMNS))
            start += self.places[name][1]
        # Two heads of rows that stand the other way round, as some checkpoints have them.
        self.orders["q4_0"] = tuple(row ^ 1 for row in range(ROWS))
        path.write_bytes(rng.bytes(start - cut))

    def copies(self):
        return [
            WeightCopy(name, matrix_packing(spec.layout, spec.shape), spec, LINEAR) for name, spec in self.specs.items()
        ] + [WeightCopy("q8_0", Packed("stored:q8_0", self.places["q8_0"][1]), self.specs["q8_0"], LINEAR)]

    def placed(self, weight):
        return Placed((Extent(self.path, *self.places[weight]),), self.orders.get(weight))

    def read(self, weight):
        start, nbytes = self.places[weight]
        rows = np.frombuffer(self.path.read_bytes()[start : start + nbytes], np.uint8).reshape(ROWS, -1)
        return rows[list(self.orders.get(weight, range(ROWS)))].tobytes()

    def drawn(self, weight):
        return None


def held(backend, memory, copy):
    found = bytearray(copy.packed.nbytes)
    backend.copy_d2h(memory.address(copy), memoryview(found))
    return bytes(found)


def expected(source, copy):
    if copy.packed.name.startswith("stored:"):
        return source.read(copy.weight)
    return pack(copy.packed.name, copy.spec.layout, copy.spec.shape, source.read(copy.weight)).tobytes()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_layout_is_what_numpy_packs(backend, tmp_path, threads, monkeypatch):
    assert isinstance(backend, HostLoader)
    source, told = Source(tmp_path / "weights"), []
    monkeypatch.setattr("atlas_core.loading.upload.processors", lambda: threads)
    loading = begin_weights(backend, source.copies(), source)
    assert loading.beside
    memory = loading.finish(lambda done, total, weight: told.append((done, total)))
    for copy in source.copies():
        assert held(backend, memory, copy) == expected(source, copy), copy.packed.name
    total = sum(copy.packed.nbytes for copy in source.copies())
    assert told[-1] == (total, total)
    assert loading.finish() is memory
    memory.free()


@pytest.mark.parametrize("left", ["all", "some"])
def test_what_is_not_in_the_page_cache_comes_in_the_other_way(backend, tmp_path, left, monkeypatch):
    source, real = Source(tmp_path / "weights"), resident.ExtentReader.descriptor
    # A pipe gives nothing without waiting, and refuses positions.
    receiver, sender = os.pipe()
    calls = iter(range(10**6))
    monkeypatch.setattr(
        resident.ExtentReader, "descriptor",
        lambda files, path: receiver if left == "all" or next(calls) % 3 else real(files, path),
    )  # fmt: skip
    memory = load_weights(backend, source.copies(), source)
    for copy in source.copies():
        assert held(backend, memory, copy) == expected(source, copy), copy.packed.name
    memory.free()
    os.close(receiver)
    os.close(sender)


def test_a_file_that_ends_too_soon_is_named_and_everything_given_back(backend, tmp_path):
    source, before = Source(tmp_path / "weights", cut=100), len(backend._memory._blocks)
    with pytest.raises(CheckpointError, match="ended at byte"):
        load_weights(backend, source.copies(), source)
    assert len(backend._memory._blocks) == before


def test_loading_can_be_stopped_half_way(backend, tmp_path):
    source = Source(tmp_path / "weights")
    loading = begin_weights(backend, source.copies(), source)
    loading.stop()
    loading.stop()
    loading.memory.free()
    assert not [thread for thread in threading.enumerate() if thread.name == "atlas-load"]


@pytest.mark.parametrize("room", [0, 1])
def test_loads_tell_what_became_of_them(backend, tmp_path, room):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    rooms, target = HostRooms(backend.alloc(64), 32), backend.alloc(64)
    for block in (rooms.address, target):
        backend.copy_h2d(bytes(64), block)
    begin = rooms.address
    with path.open("rb") as file:
        number = file.fileno()
        first = HostLoad(number, 10, 8, begin, (backend.prepare_copy(begin, target, 8),))
        beyond = HostLoad(number, 96, 8, begin, (backend.prepare_copy(begin, target + 8, 8),))
        third = HostLoad(
            number, 20, 4, begin + 20, (backend.prepare_copy(begin + 20, target + 16, 4), backend.prepare_copy(target, target + 24, 8))
        )  # fmt: skip
        loads = backend.prepare_loads([first, beyond, third], rooms)
        assert loads.states() == bytes([LoadState.WAITING] * 3)
        assert loads.run(room, 2)
        assert loads.states() == bytes([LoadState.DONE, LoadState.LEFT, LoadState.WAITING])
        assert not loads.run(room, 2)
        assert loads.states() == bytes([LoadState.DONE, LoadState.LEFT, LoadState.DONE])
        stopped = backend.prepare_loads([first], rooms)
        stopped.stop()
        assert not stopped.run(room, 1)
        assert stopped.states() == bytes([LoadState.WAITING])
    found, used = bytearray(32), bytearray(64)
    backend.copy_d2h(target, memoryview(found))
    backend.copy_d2h(begin, memoryview(used))
    first = bytes(range(10, 18))
    assert bytes(found) == first + bytes(8) + bytes(range(20, 24)) + bytes(4) + first
    assert not any(used[32 * (1 - room) : 32 * (2 - room)])
    backend.free(begin)
    backend.free(target)


def test_a_launch_with_more_arguments_than_loads_have_room_for_is_refused(backend):
    wide = backend.kernel("fast", "fast_multiply")
    zeros = {"ptr": ptr, "i32": i32, "i64": i64, "f32": f32}
    launch = backend.prepare_launch(wide, Geometry(), [zeros[param.kind](0) for param in wide.params])
    with pytest.raises(KernelError, match="fast_multiply takes"):
        backend.prepare_loads([HostLoad(0, 0, 1, 0, (launch,))], HostRooms(0, 64))
