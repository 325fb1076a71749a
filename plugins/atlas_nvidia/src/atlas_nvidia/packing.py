"""How FP8 and NVFP4 matrices lie in memory for kernels of NVIDIA machines (scaled_weights.cuh is the reader).

Rows go by eights (*units*) and summed elements by 128 (*chunks*); rows are filled up to a multiple of 16 and elements to one of 128 with
zeros. A chunk of a unit is what one warp reads: lane 4g + t has row g, and of each 16 elements the four 2t, 2t + 1, 2t + 8, 2t + 9, which
are its part of a tensor-core fragment, for 8 steps of 16 elements one behind another in its 16 or 2 × 16 bytes.

A matrix is [unit][chunk] of such pieces, then its other scales:

- ``e4m3_units``: [2][lane] 16 bytes of codes each, steps 0 to 3, then 4 to 7, of each step elements 2t, 2t + 8, 2t + 1, 2t + 9; behind all
  of them a float32 for each unit and chunk, and a float32 for each row. A weight is code · the one · the other.
- ``nvfp4_units``: [lane] 16 bytes of codes, then for each row 8 bytes, the scales of its steps; behind all of them a float32 for each row.
  A word has two steps, of each of whose four pairs the first element is in the lower half and the second in the upper one; a code lies
  there so that one mask, or one shift and one mask, leaves it where bfloat16 has sign, exponent and mantissa (``_PLACES``). Scales have
  five bits of exponent (biased by 16) and three of mantissa, so that those that e4m3 denormalises are like others; where a scale is zero its
  codes are. A weight is number · scale · the row's float32 · 2^-9, the power being what the kernel's exponents leave over.

A stack of experts is such matrices one behind another.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
import numpy.typing as npt

from atlas_core.contracts.ops import Packed
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.ops.scaled import E4M3_ROW, E4M3_TILE, NVFP4, TILE_ROWS, row_type
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.layout import StorageLayout

E4M3_UNITS, NVFP4_UNITS = "e4m3_units", "nvfp4_units"
PACKINGS = {E4M3_ROW.name: E4M3_UNITS, E4M3_TILE.name: E4M3_UNITS, NVFP4.name: NVFP4_UNITS}
"""The packing of each storage layout that kernels here read."""
UNIT, CHUNK = 8, 128
CHUNK_BYTES = {E4M3_UNITS: 1024, NVFP4_UNITS: 576}
_STEPS = 8
_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 10, 11))
"""Bits of sign, exponent and mantissa of a pair's code in its half of a word, by pair."""
_BIAS, _LEFT_OVER = 16, np.float32(512)
_SOME_ROWS = 512  # that one thread packs at once

Codes = npt.NDArray[np.uint8]


def extents(shape: tuple[int, ...]) -> tuple[int, int]:
    """Units and chunks of a matrix [rows, columns], or of each of a stack."""
    return -(-shape[-2] // (2 * UNIT)) * 2, -(-shape[-1] // CHUNK)


def packed(layout: StorageLayout, shape: tuple[int, ...]) -> Packed:
    """The packing of a weight [..., rows, columns] stored as ``layout``, one of PACKINGS."""
    name, (units, chunks) = PACKINGS[layout.name], extents(shape)
    scales = 4 * units * (UNIT + (chunks if name == E4M3_UNITS else 0))
    return Packed(name, prod(shape[:-2]) * (units * chunks * CHUNK_BYTES[name] + scales))


def pack(packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview) -> np.ndarray:
    """The packed bytes (uint8). Raises KernelError for another packing, data of another size, and tiles of unequal scales."""
    if PACKINGS.get(layout.name) != packing or len(shape) < 2:
        raise KernelError(
            f"{layout.name} {list(shape)} cannot be packed as {packing}", "the NVIDIA kernels know no such packing"
        )
    if memoryview(data).nbytes != layout.nbytes(shape):
        raise KernelError(
            f"a weight {list(shape)} stored as {layout.name} has {memoryview(data).nbytes} bytes",
            f"{layout.nbytes(shape)} were expected", "report this as a bug",
        )  # fmt: skip
    (rows, columns), (units, chunks) = shape[-2:], extents(shape)
    stored = np.frombuffer(data, row_type(layout, columns)).reshape(-1, rows)
    out = np.zeros((len(stored), packed(layout, shape).nbytes // max(1, len(stored))), np.uint8)
    body = units * chunks * CHUNK_BYTES[packing]
    codes = out[:, :body].reshape(len(stored), units, chunks, CHUNK_BYTES[packing])
    by_row = out[:, -4 * units * UNIT :].view(np.float32)
    by_unit = out[:, body : -4 * units * UNIT].view(np.float32).reshape(len(stored), units, -1)  # none for NVFP4

    def some(part: tuple[int, int]) -> None:
        matrix, first = part
        piece = stored[matrix, first : first + _SOME_ROWS]
        place = codes[matrix, first // UNIT : -(-(first + len(piece)) // UNIT)]
        if packing == NVFP4_UNITS:
            _nvfp4(piece, place)
            by_row[matrix, first : first + len(piece)] = piece["times"] / piece["by"] * _LEFT_OVER
            return
        _e4m3(piece["codes"] if layout == E4M3_ROW else piece["blocks"]["codes"].reshape(len(piece), columns), place)
        scales = by_unit[matrix, first // UNIT : first // UNIT + len(place)]
        if layout == E4M3_ROW:
            by_row[matrix, first : first + len(piece)], scales[...] = piece["scale"], 1
        else:
            by_row[matrix, first : first + len(piece)], scales[...] = 1, _shared(piece["blocks"]["scale"])

    _everywhere(some, [(matrix, first) for matrix in range(len(stored)) for first in range(0, rows, _SOME_ROWS)])
    return out.reshape(-1)


def _everywhere(work: Callable[[tuple[int, int]], None], parts: list[tuple[int, int]]) -> None:
    """``work`` for each part; arrays are copied without the interpreter's lock."""
    if len(parts) == 1:
        work(parts[0])
        return
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(work, parts):
            pass


def _shared(scales: np.ndarray) -> np.ndarray:
    """float32 [units, chunks] of [rows, chunks]. Raises KernelError where rows of a unit differ."""
    units = -(-len(scales) // TILE_ROWS)
    full = np.concatenate([scales, np.repeat(scales[-1:], units * TILE_ROWS - len(scales), axis=0)])
    tiles = full.reshape(units, TILE_ROWS, -1)
    if not (tiles == tiles[:, :1]).all():
        raise KernelError(
            "eight rows of an FP8 matrix that share a tile have different scales",
            "the matrix was put together from parts that do not begin at a multiple of eight rows", "pass --transcode bf16",
        )  # fmt: skip
    shared: np.ndarray = tiles[:, 0]
    return shared


def _filled(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The array with zeros up to [rows, columns]."""
    if array.shape == (rows, columns):
        return np.ascontiguousarray(array)
    full = np.zeros((rows, columns), array.dtype)
    full[: array.shape[0], : array.shape[1]] = array
    return full


def _e4m3(codes: Codes, place: Codes) -> None:
    """Codes [rows, columns] into [units, chunks, 1024]."""
    units, chunks = place.shape[:2]
    # Half, step, pair, t, which of the pair; then t outermost, and the pairs' first elements before their second ones.
    parts = _filled(codes, units * UNIT, chunks * CHUNK).reshape(-1, 2, 4, 2, 4, 2)
    lanes = np.ascontiguousarray(parts.transpose(0, 1, 4, 2, 5, 3)).reshape(units, UNIT, chunks, 2, 64)
    place.reshape(units, chunks, 2, UNIT, 64)[...] = lanes.transpose(0, 2, 3, 1, 4)


def _nvfp4(rows: np.ndarray, place: Codes) -> None:
    """Rows of NVFP4 into [units, chunks, 576]."""
    units, chunks = place.shape[:2]
    table = _TABLES[rows["blocks"]["scale"]]
    fine, zero, negative = table & 0xFF, table == 0, table >> 8
    codes = rows["blocks"]["codes"] ^ (negative * 0x88).astype(np.uint8)[..., None]
    codes[zero] = 0
    filled = _filled(codes.reshape(len(rows), -1), units * UNIT, chunks * CHUNK // 2)
    bytes_of = filled.reshape(units, UNIT, chunks, 4, 4, 4)  # word (two steps), pair, t
    words = np.zeros((units, UNIT, chunks, 4, 4), np.uint32)
    for pair in range(4):
        words |= _WORDS[pair][bytes_of[..., pair, :]]
    lanes = words.transpose(0, 2, 1, 4, 3)  # unit, chunk, row, t, word
    place[..., :512] = np.ascontiguousarray(lanes).reshape(units, chunks, -1).view(np.uint8)
    scales = _filled(fine.astype(np.uint8), units * UNIT, chunks * _STEPS).reshape(units, UNIT, chunks, _STEPS)
    place[..., 512:] = scales.transpose(0, 2, 1, 3).reshape(units, chunks, -1)


def _word_tables() -> tuple[npt.NDArray[np.uint32], ...]:
    """For each pair and byte of a file the bits of a word."""
    found = []
    for places in _PLACES:
        code = np.arange(16, dtype=np.uint32)
        half = sum(((code >> (3 - i) & 1) << place for i, place in enumerate(places)), np.zeros(16, np.uint32))
        byte = np.arange(256)
        found.append((half[byte & 15] | half[byte >> 4] << 16).astype(np.uint32))
    return tuple(found)


def _scale_table() -> npt.NDArray[np.uint16]:
    """For each e4m3 byte five bits of exponent and three of mantissa, and whether it is negative (256); 0 for zero."""
    values = np.arange(256, dtype=np.uint8).view(numpy_dtype(DType.F8E4M3)).astype(np.float32)
    mantissa, exponent = np.frexp(np.abs(np.nan_to_num(values)))
    fine = (exponent - 1 + _BIAS) * 8 + np.round((mantissa * 2 - 1) * 8).astype(np.int64)
    return np.where(values == 0, 0, fine + 256 * (values < 0)).astype(np.uint16)


_WORDS, _TABLES = _word_tables(), _scale_table()
