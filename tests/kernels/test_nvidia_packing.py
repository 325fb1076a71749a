"""What NVIDIA kernels read of FP8 and NVFP4 weights, put together again as they do it, is what the format says."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from atlas_core.loading.scaled_format import ScaledFormat
from atlas_core.ops.scaled import E4M3_ROW, E4M3_TILE, NVFP4, row_type
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.layout import StorageLayout
from atlas_nvidia.packing import CHUNK, CHUNK_BYTES, E4M3_UNITS, NVFP4_UNITS, UNIT, extents, pack, packed

FORMAT = ScaledFormat()
RNG = np.random.default_rng(3)
_SIGN_AND_NUMBER = 0x81C081C0


def of_lane(chunks: np.ndarray, lane: int, step: int, packing: str) -> Iterator[np.ndarray]:
    """The numbers [units, chunks] that a lane multiplies in a step, scaled by those scales that lie in the chunk."""
    if packing == E4M3_UNITS:
        at = step // 4 * 512 + lane * 16 + step % 4 * 4
        for i in (0, 2, 1, 3):
            yield chunks[..., at + i].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return
    at = lane * 16 + step // 2 * 4
    word = chunks[..., at : at + 4].copy().view(np.uint32)[..., 0]
    pairs = (
        word & _SIGN_AND_NUMBER, word << 3 & _SIGN_AND_NUMBER, word << 6 & _SIGN_AND_NUMBER,
        word << 1 & 0x80008000 | word >> 5 & 0x01400140 | word >> 3 & 0x00800080,
    )  # fmt: skip
    scale = chunks[..., 512 + lane // 4 * 8 + step].astype(np.int32)
    fine = np.float32(2) ** ((scale >> 3) - 16) * (1 + (scale & 7) / np.float32(8))
    for pair in pairs[step % 2 * 2 :][:2]:
        for half in (pair & 0xFFFF, pair >> 16):
            yield (half.astype(np.uint32) << 16).view(np.float32) * np.float32(2.0**126) * fine


def read(packing: str, shape: tuple[int, int], data: np.ndarray) -> np.ndarray:
    """The float32 weights of one matrix, filled up."""
    units, chunks = extents(shape)
    body = units * chunks * CHUNK_BYTES[packing]
    pieces = data[:body].reshape(units, chunks, -1)
    found = np.empty((units, UNIT, chunks, CHUNK), np.float32)
    for lane in range(32):
        row, t = divmod(lane, 4)
        for step in range(8):
            for column, values in zip((0, 1, 8, 9), of_lane(pieces, lane, step, packing), strict=True):
                found[:, row, :, 16 * step + 2 * t + column] = values
    if packing == E4M3_UNITS:
        found *= data[body : body + 4 * units * chunks].view(np.float32).reshape(units, 1, chunks, 1)
    rows = data[-4 * units * UNIT :].view(np.float32).reshape(units, UNIT, 1, 1)
    return (found * rows * np.float32(1 if packing == E4M3_UNITS else 2.0**-9)).reshape(units * UNIT, -1)


@pytest.mark.parametrize("layout", [E4M3_ROW, E4M3_TILE, NVFP4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", [(16, 128), (13, 128), (40, 256), (1030, 384), (3, 24, 256)], ids=str)
def test_every_weight_is_where_its_lane_looks(layout: StorageLayout, shape: tuple[int, ...]) -> None:
    values = RNG.standard_normal(shape).astype(np.float32) * np.exp(RNG.normal(size=(*shape[:-1], 1))).astype(
        np.float32
    )
    values[..., 3, :16] = 0
    stored = FORMAT.encode(layout.name, values)
    want = FORMAT.decode(layout.name, stored, shape).reshape(-1, *shape[-2:])
    asked = packed(layout, shape)
    data = pack(asked.name, layout, shape, stored)
    assert data.nbytes == asked.nbytes
    rows, columns = shape[-2:]
    for matrix, part in zip(want, data.reshape(len(want), -1), strict=True):
        found = read(asked.name, (rows, columns), part)
        # Powers of two and numbers of few bits are exact; the factor of a matrix is rounded once, with the scale or by itself.
        np.testing.assert_allclose(found[:rows, :columns], matrix, rtol=2.0**-22, atol=0)
        assert not found[rows:].any()
        assert not found[:, columns:].any()


def test_ragged_columns_are_filled_with_zeros() -> None:
    for layout in (E4M3_ROW, NVFP4):
        values = RNG.standard_normal((16, 80)).astype(np.float32)
        stored = FORMAT.encode(layout.name, values)
        found = read(
            packed(layout, (16, 80)).name, (16, 80), pack(packed(layout, (16, 80)).name, layout, (16, 80), stored)
        )
        np.testing.assert_allclose(found[:, :80], FORMAT.decode(layout.name, stored, (16, 80)), rtol=2.0**-22)
        assert not found[:, 80:].any()


def test_every_number_and_every_scale_of_nvfp4() -> None:
    """Scales that e4m3 denormalises, zero and negative ones included."""
    rows = np.zeros(128, row_type(NVFP4, 32))
    rows["times"], rows["by"] = 0.25, 2
    rows["blocks"]["scale"] = np.arange(256).reshape(128, 2)
    rows["blocks"]["scale"][[63, 127], 1] = 0  # NaN
    codes = np.arange(16, dtype=np.uint8)
    rows["blocks"]["codes"] = codes[::2] | codes[1::2] << 4
    data = pack(NVFP4_UNITS, NVFP4, (128, 32), rows.tobytes())
    found = read(NVFP4_UNITS, (128, 32), data)[:, :32]
    np.testing.assert_array_equal(found, FORMAT.decode(NVFP4.name, rows.tobytes(), (128, 32)))


def test_rows_take_no_more_than_the_file_and_two_per_cent() -> None:
    shape = (4096, 4096)
    for layout, stored in ((E4M3_ROW, 4096), (E4M3_TILE, 4096), (NVFP4, 4096 * 9 // 16)):
        assert packed(layout, shape).nbytes <= 4096 * stored * 1.01


def test_a_tile_put_together_from_unequal_rows_is_refused() -> None:
    rows = np.zeros(8, row_type(E4M3_TILE, 128))
    rows["blocks"]["scale"] = np.arange(8)[:, None]
    with pytest.raises(KernelError, match="share a tile") as refused:
        pack(E4M3_UNITS, E4M3_TILE, (8, 128), rows.tobytes())
    assert "--transcode" in (refused.value.cure or "")
    with pytest.raises(KernelError, match="bytes"):
        pack(E4M3_UNITS, E4M3_TILE, (8, 128), bytes(5))
    with pytest.raises(KernelError, match="cannot be packed"):
        pack(NVFP4_UNITS, E4M3_TILE, (8, 128), rows.tobytes())
