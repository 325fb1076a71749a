"""Storage layouts of numbers of eight and four bits with the scales that their files give them, and how a row of each lies in memory."""

from functools import cache
from typing import Any

import numpy as np

from atlas_core.vocab.layout import StorageLayout

E4M3_ROW = StorageLayout("e4m3_row", 16, 16, head_bytes=4)
"""A float32 scale for a row of float8 e4m3: scales of channels, or of a whole matrix."""
E4M3_TILE = StorageLayout("e4m3_tile", 128, 132)
"""For 128 numbers of a row a float32 scale, then the numbers, float8 e4m3. Rows 8i to 8i + 7 of a matrix have the same scales."""
E4M3_BLOCK = StorageLayout("e4m3_f32_32", 32, 36)
"""A float32 scale, then 32 numbers of float8 e4m3: tiles of other sizes."""
NVFP4 = StorageLayout("nvfp4", 16, 9, head_bytes=8)
"""Two float32 for a row, m and d; for 16 numbers a scale s, float8 e4m3, then eight bytes of float4 e2m1, of each the low half first.

A weight is number · (s · m / d); one of m and d is 1, since tools give the scale of a matrix as a factor or as a divisor.
"""
LAYOUTS = (E4M3_ROW, E4M3_TILE, E4M3_BLOCK, NVFP4)
TILE_ROWS = 8
"""Rows of E4M3_TILE that share their scales."""


@cache
def row_type(layout: StorageLayout, columns: int) -> np.dtype[Any]:
    """One row of so many weights in one of LAYOUTS. Raises ValueError when it is no whole number of blocks."""
    blocks = layout.row_bytes(columns) and columns // layout.block
    if layout == E4M3_ROW:
        return np.dtype([("scale", "<f4"), ("codes", "u1", columns)])
    if layout == NVFP4:
        block = np.dtype([("scale", "u1"), ("codes", "u1", 8)])
        return np.dtype([("times", "<f4"), ("by", "<f4"), ("blocks", block, blocks)])
    return np.dtype([("blocks", np.dtype([("scale", "<f4"), ("codes", "u1", layout.block)]), blocks)])


def code_blocks(blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The codes of ``blocks`` of a row type as one number, or string of bytes, a block: numpy copies these in one go. A view."""
    fields = blocks.dtype.fields
    assert fields is not None
    kind, offset = fields["codes"][:2]
    whole = np.dtype("<u8") if kind.itemsize == 8 else np.dtype(f"V{kind.itemsize}")
    only = np.dtype({"names": ["codes"], "formats": [whole], "offsets": [offset], "itemsize": blocks.dtype.itemsize})
    view: np.ndarray[Any, Any] = blocks.view(only)["codes"]
    return view
