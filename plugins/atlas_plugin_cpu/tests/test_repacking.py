"""The kernel that packs weights while they are read gives the bytes of the numpy packing, for every layout, piece by piece."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_plugin_cpu.backend import open_backend
from atlas_plugin_cpu.packing import MATRIX_LAYOUTS, pack, repack

BLOCKS = {
    "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q4_k": (256, 144), "q5_k": (256, 176),
    "q6_k": (256, 210), "iq4_xs": (256, 136),
}  # fmt: skip


def layout_of(name):
    return StorageLayout(name, *BLOCKS[name]) if name in BLOCKS else plain(DType(name))


@pytest.fixture(scope="module")
def stage(library):
    backend = open_backend(library, threads=3)
    yield backend, [backend.alloc(1 << 20) for _ in range(3)]
    backend.close()


def repacked(stage, layout, shape, data, *, order=None, piece=None):
    """By the kernel, ``piece`` rows at a time."""
    backend, (source, target, places) = stage
    made = repack(f"{layout.name}_x16", layout, shape)
    rows, width, stream = int(np.prod(shape[:-1])), layout.row_bytes(shape[-1]), backend.create_stream()
    out = np.empty(-(-rows // made.rows) * made.nbytes, np.uint8)
    backend.copy_h2d(np.full(out.nbytes, 0xEE, np.uint8).tobytes(), target)
    backend.copy_h2d(data.tobytes(), source)
    if order is not None:
        backend.copy_h2d(np.asarray(order, np.int32).tobytes(), places)
    step = piece or rows
    for first in range(0, rows, step):
        at = source if order is not None else source + first * width
        listed = places + 4 * first if order is not None else 0
        launch = made.launch(backend, at, listed, target + first // made.rows * made.nbytes, min(step, rows - first))
        backend.enqueue(launch, stream)
    backend.copy_d2h(target, memoryview(out))
    return out


@settings(deadline=None, max_examples=80)
@given(
    name=st.sampled_from(MATRIX_LAYOUTS), rows=st.integers(1, 70), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1),
    piece=st.sampled_from([None, 16, 48]), shuffled=st.booleans(),
)  # fmt: skip
def test_every_layout_is_packed_to_the_same_bytes(stage, name, rows, blocks, seed, piece, shuffled):
    layout, rng = layout_of(name), np.random.default_rng(seed)
    shape = (rows, blocks * layout.block)
    data = rng.integers(0, 256, (rows, layout.row_bytes(shape[1])), dtype=np.uint8)
    order = rng.permutation(rows) if shuffled else None
    expected = pack(f"{name}_x16", layout, shape, (data if order is None else data[order]).tobytes())
    np.testing.assert_array_equal(repacked(stage, layout, shape, data, order=order, piece=piece), expected)


def test_a_vector_is_copied(stage):
    backend, (source, target, _) = stage
    values = np.random.default_rng(4).standard_normal(70).astype(np.float32)
    made = repack("f32", plain(DType.F32), (70,))
    backend.copy_h2d(values.tobytes(), source)
    backend.enqueue(made.launch(backend, source, 0, target, 1), backend.create_stream())
    out = np.empty(70, np.float32)
    backend.copy_d2h(target, memoryview(out).cast("B"))
    np.testing.assert_array_equal(out, values)
    assert (made.rows, made.nbytes) == (1, 280)


def test_a_stack_of_matrices_is_packed_one_behind_another(stage):
    layout, shape = layout_of("q4_k"), (3, 32, 256)
    data = np.random.default_rng(5).integers(0, 256, (3, 32, 144), dtype=np.uint8)
    expected = np.concatenate([pack("q4_k_x16", layout, shape[1:], matrix.tobytes()) for matrix in data])
    np.testing.assert_array_equal(repacked(stage, layout, shape, data), expected)


@pytest.mark.parametrize(
    ("packing", "layout", "shape"),
    [
        ("f32", "f16", (64,)),
        ("f32", "f32", (4, 16)),
        ("q4_0_x16", "q4_1", (16, 32)),
        ("q4_0_x16", "q4_0", (2, 24, 32)),
        ("q2_k_x16", "f32", (16, 4)),
    ],
)
def test_what_the_kernel_does_not_pack_is_left_to_numpy(packing, layout, shape):
    assert repack(packing, layout_of(layout), shape) is None
