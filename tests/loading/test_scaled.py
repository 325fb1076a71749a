"""Weights and their scales as one tensor: every way in which they are written, in whole and in parts."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.conformance.formats import test_format as conform
from atlas_core.contracts.checkpoint import Checkpoint
from atlas_core.loading.scaled import with_scales
from atlas_core.loading.scaled_format import ScaledFormat
from atlas_core.ops.scaled import E4M3_BLOCK, E4M3_ROW, NVFP4
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import TensorInfo

FORMAT = ScaledFormat()
KINDS = {
    np.dtype(np.float32): DType.F32, np.dtype(np.uint8): DType.U8, np.dtype(ml_dtypes.bfloat16): DType.BF16,
    np.dtype(ml_dtypes.float8_e4m3fn): DType.F8E4M3,
}  # fmt: skip
RNG = np.random.default_rng(11)
ROWS, COLUMNS = 40, 96


class Memory:
    """A checkpoint of arrays, each of its own type."""

    naming = "hf"
    path = Path("memory")

    def __init__(self, quantization: dict[str, Any] | None = None, **arrays: np.ndarray) -> None:
        self.quantization = quantization or {}
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.arrays = {name.replace("__", "."): array for name, array in arrays.items()}
        self.tensors = {
            name: TensorInfo(name, array.shape, KINDS[array.dtype].value, array.nbytes)
            for name, array in self.arrays.items()
        }

    def layout(self, name: str) -> StorageLayout:
        return plain(DType(name))

    def read(self, name: str, rows: list[tuple[int, int]] | None = None) -> bytes:
        array = self.arrays[name]
        return b"".join(array[start:end].tobytes() for start, end in rows) if rows is not None else array.tobytes()

    def tokenizer(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to close."""


def e4m3(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)


def scales(*shape: int) -> np.ndarray:
    return RNG.uniform(0.01, 2, size=shape).astype(np.float32)


def fp8_blocks() -> tuple[Memory, np.ndarray]:
    """Blocks of 16 rows and 64 columns, of which the last are cut."""
    codes, by = e4m3(ROWS, COLUMNS), scales(3, 2)
    want = codes.astype(np.float32) * by.repeat(16, 0)[:ROWS].repeat(64, 1)[:, :COLUMNS]
    return Memory({"weight_block_size": [16, 64]}, m__weight=codes, m__weight_scale_inv=by), want


def fp8_tiles() -> tuple[Memory, np.ndarray]:
    """Blocks of 24 rows and 128 columns, of which the last are cut."""
    codes, by = e4m3(ROWS, 256), scales(2, 2).astype(ml_dtypes.bfloat16)
    want = codes.astype(np.float32) * by.astype(np.float32).repeat(24, 0)[:ROWS].repeat(128, 1)
    return Memory({"weight_block_size": [24, 128]}, m__weight=codes, m__weight_scale_inv=by), want


def fp8_rows() -> tuple[Memory, np.ndarray]:
    codes, by = e4m3(ROWS, COLUMNS), scales(ROWS, 1).astype(ml_dtypes.bfloat16)
    return Memory(m__weight=codes, m__weight_scale=by), codes.astype(np.float32) * by.astype(np.float32)


def fp8_tensor() -> tuple[Memory, np.ndarray]:
    codes, by = e4m3(ROWS, COLUMNS), scales()
    return Memory(m__weight=codes, m__weight_scale=np.array(by)), codes.astype(np.float32) * by


def nvfp4(*, packed: bool) -> tuple[Memory, np.ndarray]:
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes, by = RNG.integers(0, 16, (ROWS, COLUMNS), np.uint8), np.abs(e4m3(ROWS, COLUMNS // 16).astype(np.float32))
    halves, whole = codes[:, ::2] | codes[:, 1::2] << 4, np.float32(448.0 if packed else 0.01)
    fine = by.astype(ml_dtypes.float8_e4m3fn)
    used = fine.astype(np.float32) / whole if packed else fine.astype(np.float32) * whole
    names = ("weight_packed", "weight_global_scale") if packed else ("weight", "weight_scale_2")
    memory = Memory(**{f"m__{names[0]}": halves, "m__weight_scale": fine, f"m__{names[1]}": np.full(1, whole)})
    return memory, numbers[codes] * used.repeat(16, 1)


WAYS = {
    "blocks": fp8_blocks, "tiles": fp8_tiles, "rows": fp8_rows, "tensor": fp8_tensor, "modelopt": lambda: nvfp4(packed=False),
    "compressed": lambda: nvfp4(packed=True),
}  # fmt: skip


def merged(memory: Memory) -> Checkpoint:
    return with_scales(memory)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_writing_them(way: str) -> None:
    memory, want = WAYS[way]()
    checkpoint = merged(memory)
    assert list(checkpoint.tensors) == ["m.weight"]
    info = checkpoint.tensors["m.weight"]
    assert info.shape == want.shape
    data = checkpoint.read("m.weight")
    assert len(data) == info.nbytes == checkpoint.layout(info.layout).nbytes(info.shape)
    np.testing.assert_array_equal(FORMAT.decode(info.layout, data, info.shape), want)


@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=30)
@given(spans=st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted).map(tuple), min_size=1))
def test_rows_are_those_of_the_whole(way: str, spans: list[tuple[int, int]]) -> None:
    memory, _ = WAYS[way]()
    checkpoint = merged(memory)
    whole = np.frombuffer(checkpoint.read("m.weight"), np.uint8).reshape(ROWS, -1)
    want = np.concatenate([whole[start:end] for start, end in spans])
    assert bytes(checkpoint.read("m.weight", spans)) == want.tobytes()


def test_scales_of_activations_and_of_the_cache_are_left_aside() -> None:
    one = np.ones(1, np.float32)
    memory, _ = fp8_tensor()
    more = {
        "m.input_scale": one,
        "a.k_proj.k_scale": one,
        "a.v_proj.v_scale": one,
        "norm.weight": np.ones(4, np.float32),
    }
    memory = Memory(**{name.replace(".", "__"): array for name, array in (memory.arrays | more).items()})
    checkpoint = merged(memory)
    assert set(checkpoint.tensors) == {"m.weight", "norm.weight"}
    assert checkpoint.read("norm.weight") == memory.read("norm.weight")


def test_a_checkpoint_without_scales_stays_what_it_is() -> None:
    memory = Memory(m__weight=np.ones((2, 32), np.float32), m__input_scale=np.ones(1, np.float32))
    assert merged(memory) is memory


@pytest.mark.parametrize(
    ("arrays", "quantization", "named"),
    [
        ({"m__weight": e4m3(40, 96), "m__weight_scale_inv": scales(3, 2)}, {}, "m.weight_scale_inv"),
        (
            {"m__weight": e4m3(40, 96), "m__weight_scale_inv": scales(3, 2)},
            {"weight_block_size": [16, 32]},
            "m.weight_scale_inv",
        ),
        ({"m__weight": e4m3(40, 96), "m__weight_scale": scales(39, 1)}, {}, "m.weight_scale"),
        ({"m__weight": e4m3(4, 40), "m__weight_scale": scales(1)}, {}, "rows of 40"),
        (
            {"m__weight": np.zeros((4, 16), np.uint8), "m__weight_scale": e4m3(4, 3), "m__weight_scale_2": scales(1)},
            {},
            "m.weight_scale",
        ),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(arrays: dict[str, Any], quantization: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        merged(Memory(quantization, **arrays))


def test_numbers_without_a_scale_are_refused_by_name() -> None:
    memory, _ = fp8_tensor()
    more = {name.replace(".", "__"): array for name, array in memory.arrays.items()}
    verdict = FORMAT.detect({}, merged(Memory(alone__weight=e4m3(4, 32), **more)).tensors)
    assert not verdict.ok
    assert verdict.reasons == ("alone.weight is stored as f8e4m3, and no scale goes with it",)


def test_known_bits() -> None:
    one = np.float32(0.5).tobytes() + bytes([0x38, 0xB8, 0x7E, 0x01] * 8)
    for layout in (E4M3_BLOCK, E4M3_ROW):
        np.testing.assert_array_equal(
            FORMAT.decode(layout.name, one, (1, 32))[0, :4], np.float32([0.5, -0.5, 224, 0.5 * 2**-9])
        )
    four = np.float32([3, 1]).tobytes() + bytes([0x40, 0x21, 0xF7, 0x80, 0x00, 0, 0, 0, 0])
    np.testing.assert_array_equal(FORMAT.decode(NVFP4.name, four, (1, 16))[0, :6], np.float32([3, 6, 36, -36, 0, 0]))


@pytest.mark.parametrize(
    ("way", "layout", "columns"), [("blocks", "e4m3_f32_32", COLUMNS), ("tiles", "e4m3_tile", 256), ("rows", "e4m3_row", COLUMNS),
    ("tensor", "e4m3_row", COLUMNS), ("modelopt", "nvfp4", COLUMNS)]
)  # fmt: skip
def test_what_the_file_has_is_what_is_kept(way: str, layout: str, columns: int) -> None:
    """Rows of 4,096 are at most so much longer than their part of the file."""
    checkpoint = merged(WAYS[way]()[0])
    info = checkpoint.tensors["m.weight"]
    assert (info.layout, info.shape[1]) == (layout, columns)
    stored = {"nvfp4": 4096 * 9 // 16}.get(layout, 4096)
    allowed = {"e4m3_f32_32": 0.125, "e4m3_tile": 0.0313}.get(layout, 0.004)
    assert checkpoint.layout(layout).row_bytes(4096) <= stored * (1 + allowed)


def test_the_format_keeps_its_promises() -> None:
    report = conform(FORMAT)
    assert report.ok, report.table()
