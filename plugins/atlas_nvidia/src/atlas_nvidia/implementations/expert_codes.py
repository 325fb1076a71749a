"""How stacks of experts in FP8 and NVFP4 lie in memory for kernels of NVIDIA machines (expert_codes.cuh is the reader).

Experts are nearly all of a mixture, tens of gigabytes, so that packing them has to be little more than a copy: codes stay in rows, and what
stands between them in a storage layout goes behind them. A packed stack [experts, rows, columns] is

- codes, [experts · rows] rows that are filled up with zeros to a multiple of 128 columns (*chunks*);
- scales: of ``expert_rows_e2m1`` the e4m3 ones of the file, 8 bytes a row and chunk, of ``expert_rows_e4m3`` a float32 for 8 rows and a chunk;
- up to a multiple of 16 bytes, then a float32 for each row, with which its sums are multiplied.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np

from atlas_core.contracts.ops import Packed
from atlas_core.ops.scaled import E4M3_ROW, E4M3_TILE, NVFP4, TILE_ROWS, code_blocks, row_type
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.layout import StorageLayout

E2M1, E4M3 = "expert_rows_e2m1", "expert_rows_e4m3"
PACKINGS = {NVFP4.name: E2M1, E4M3_ROW.name: E4M3, E4M3_TILE.name: E4M3}
"""The packing of each storage layout that kernels of experts read."""
CHUNK = 128
_CODE_BYTES = {E2M1: 64, E4M3: 128}  # of a row of a chunk
_SCALE_BYTES = {E2M1: 64, E4M3: 4}  # of 8 rows of a chunk
_SOME_ROWS = 2048  # that a thread packs at once


def packed(layout: StorageLayout, shape: tuple[int, ...]) -> Packed:
    """The packing of a stack [experts, rows, columns] stored as ``layout``, one of PACKINGS; rows are a multiple of 8."""
    name = PACKINGS[layout.name]
    return Packed(name, sections(name, shape)[-1])


def sections(packing: str, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Where in a packed stack of ``shape`` codes and scales end, where factors begin and end."""
    rows, chunks = prod(shape[:-1]), -(-shape[-1] // CHUNK)
    codes = rows * chunks * _CODE_BYTES[packing]
    scales = codes + rows // TILE_ROWS * chunks * _SCALE_BYTES[packing]
    factors = -(-scales // 16) * 16
    return codes, scales, factors, factors + 4 * rows


def pack(packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview) -> np.ndarray:
    """The packed bytes (uint8). Raises KernelError for another packing, data of another size, and tiles whose rows differ in scale."""
    rows, columns = prod(shape[:-1]), shape[-1]
    if PACKINGS.get(layout.name) != packing or rows % TILE_ROWS or memoryview(data).nbytes != layout.nbytes(shape):
        raise KernelError(
            f"{memoryview(data).nbytes} bytes of {list(shape)} stored as {layout.name} cannot be packed as {packing}",
            f"that is for {' and '.join(PACKINGS)} in multiples of {TILE_ROWS} rows",
            "this is a fault of the caller",
        )
    stored = np.frombuffer(data, row_type(layout, columns))
    codes_end, scales_end, factors_from, end = sections(packing, shape)
    out = np.empty(end, np.uint8)
    out[scales_end:factors_from] = 0
    codes, scales = out[:codes_end].reshape(rows, -1), out[codes_end:scales_end].reshape(rows // TILE_ROWS, -1)
    factors = out[factors_from:].view(np.float32)

    def some(first: int) -> None:
        part = slice(first, min(first + _SOME_ROWS, rows))
        tiles = slice(part.start // TILE_ROWS, part.stop // TILE_ROWS)
        piece = stored[part]
        if layout == E4M3_ROW:
            _placed(piece["codes"], codes[part])
            scales[tiles].view(np.float32)[...], factors[part] = 1, piece["scale"]
            return
        blocks = piece["blocks"]
        _placed(code_blocks(blocks), codes[part])
        if packing == E2M1:
            _placed(blocks["scale"], scales[tiles].reshape(len(piece), -1))
            factors[part] = piece["times"] / piece["by"]
        else:
            scales[tiles].view(np.float32)[...], factors[part] = _shared(blocks["scale"]), 1

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # arrays are copied without the interpreter's lock
        for _ in pool.map(some, range(0, rows, _SOME_ROWS)):
            pass
    return out


def _placed(values: np.ndarray, to: np.ndarray) -> None:
    """``values`` [rows, n] of so many bytes each at the beginning of rows of bytes, zeros behind them."""
    filled = values.shape[1] * values.itemsize
    to[:, :filled].view(values.dtype)[...] = values
    to[:, filled:] = 0


def _shared(scales: np.ndarray) -> np.ndarray:
    """float32 [tiles, chunks] of [rows, chunks]. Raises KernelError where rows of a tile differ."""
    tiles = scales.reshape(-1, TILE_ROWS, scales.shape[1])
    if not (tiles == tiles[:, :1]).all():
        raise KernelError(
            f"{TILE_ROWS} rows of FP8 experts have different scales for the same columns",
            "scales are for tiles of 128 rows, and these rows do not begin at a multiple of 8",
            "pass --transcode bf16",
        )
    shared: np.ndarray = tiles[:, 0]
    return shared
