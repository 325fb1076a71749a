"""A packed image gives back what the device held, and whatever happened to the file is found before it is used."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atlas_core.contracts.ops import Buffer, OperandSpec, Packed
from atlas_core.loading import image
from atlas_core.loading.image import UnusableImageError, open_image, write_image
from atlas_core.loading.upload import load_packed
from atlas_core.runtime.loader import WeightCopy, WeightMemory
from atlas_core.testing.host import HostBackend, HostKernels
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError

SIZES = (1, 4096, 10_000, 300_000, 70)
IDENTITY = {"checkpoint": "a", "plugins": "b"}


def copies_of(sizes):
    spec = OperandSpec((1,), DType.U8)
    return [WeightCopy(f"w{i}", Packed(f"p{i % 2}", nbytes), spec, None) for i, nbytes in enumerate(sizes)]


def held(backend, copies, seed=1):
    rng, memory = random.Random(seed), WeightMemory(backend)
    for copy in copies:
        address = backend.alloc(copy.packed.nbytes)
        backend.copy_h2d(rng.randbytes(copy.packed.nbytes), address)
        memory.buffers[copy.weight, copy.packed.name] = Buffer(address, copy.packed.nbytes)
    return memory


def contents(backend, memory):
    return {key: bytes(backend.view(buffer.address, buffer.nbytes)) for key, buffer in memory.buffers.items()}


def told(done, total, weight):
    assert 0 < done <= total
    assert weight


@pytest.fixture
def backend():
    return HostBackend(HostKernels(), total_memory=1 << 26)


@pytest.fixture
def kept(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(image, "CHUNK", 4096)
    copies = copies_of(SIZES)
    memory = held(backend, copies)
    path = tmp_path / "deeper" / "model.packed"
    write_image(path, backend, memory, copies, IDENTITY, told)
    return path, copies, memory


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=6), chunk=st.sampled_from([512, 4096, 1 << 20]))
def test_the_device_gets_what_it_had(tmp_path_factory, sizes, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "CHUNK", chunk)
        backend = HostBackend(HostKernels(), total_memory=1 << 26)
        copies = copies_of(sizes)
        memory = held(backend, copies)
        path = tmp_path_factory.mktemp("images") / "m.packed"
        write_image(path, backend, memory, copies, IDENTITY, told)
        again = load_packed(backend, copies, open_image(path, copies, IDENTITY), told)
        assert contents(backend, again) == contents(backend, memory)


def test_no_image_is_none(tmp_path):
    assert open_image(tmp_path / "none", copies_of(SIZES), IDENTITY) is None


def test_every_changed_byte_is_found(backend, kept):
    path, copies, memory = kept
    good, rng = path.read_bytes(), random.Random(3)
    spared = 0
    for at in [*range(0, 400, 7), *(rng.randrange(len(good)) for _ in range(60)), len(good) - 1]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
        try:
            opened = open_image(path, copies, IDENTITY)
            loaded = load_packed(backend, copies, opened, told)
        except CheckpointError as error:
            assert str(path) in error.what
            continue
        spared += 1  # between two weights nothing is stored
        assert contents(backend, loaded) == contents(backend, memory)
        loaded.free()
    assert spared < 20


def test_damage_is_named_by_its_bytes(backend, kept):
    path, copies, _ = kept
    opened = open_image(path, copies, IDENTITY)
    start, _ = opened.places["w3", "p1"]
    good = bytearray(path.read_bytes())
    good[start + 2 * 4096 + 5] ^= 1
    path.write_bytes(good)
    used = backend.memory()[0]
    with pytest.raises(CheckpointError) as found:
        load_packed(backend, copies, opened, told)
    assert f"bytes {start + 2 * 4096} to {start + 3 * 4096 - 1}" in found.value.why
    assert backend.memory()[0] == used


@pytest.mark.parametrize("keep", [0, 10, 39, 100, 4096, -4096, -1])
def test_a_file_that_ends_early_is_damaged(kept, keep):
    path, copies, _ = kept
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UnusableImageError, match="damaged"):
        open_image(path, copies, IDENTITY)


def test_what_differs_is_named(kept):
    path, copies, _ = kept
    with pytest.raises(UnusableImageError, match="made for something else") as found:
        open_image(path, copies, {**IDENTITY, "plugins": "c", "kernels": "d"})
    assert "kernels, plugins" in found.value.why
    other = [replace(copies[0], packed=Packed("p9", 1)), *copies[1:]]
    with pytest.raises(UnusableImageError) as found:
        open_image(path, other, IDENTITY)
    assert "weights" in found.value.why


def test_a_file_of_another_kind_is_not_read(kept):
    path, copies, _ = kept
    path.write_bytes(b"GGUF" + path.read_bytes()[4:])
    with pytest.raises(UnusableImageError, match="damaged"):
        open_image(path, copies, IDENTITY)


def test_an_image_that_cannot_be_written_leaves_nothing(backend, tmp_path):
    copies = copies_of(SIZES)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_image(tmp_path / "file" / "m", backend, held(backend, copies), copies, IDENTITY, told)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_image(backend, kept, monkeypatch):
    path, copies, memory = kept
    before = path.read_bytes()

    def full(file, data, at):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image, "_put", full)
    with pytest.raises(CheckpointError) as found:
        write_image(path, backend, memory, copies, IDENTITY, told)
    assert found.value.why == "No space left on device"
    assert [each.read_bytes() for each in path.parent.iterdir()] == [before]
