"""How weights lie in memory for the CPU's kernels: rows in groups of 16, interleaved so that one load brings a column.

``weights.h`` is the reader. Packing again or for another op gives the same bytes, so tied weights share one copy.
"""

from collections.abc import Callable, Mapping

import numpy as np

from atlas_core.contracts.ops import Packed
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.layout import StorageLayout

LANES = 16
_BLOCK = 32
VECTOR = "f32"
"""Packing of weights that are vectors (norms, biases): plain float32."""

_PLAIN: Mapping[str, np.dtype[np.generic]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


Interleave = Callable[[np.ndarray], np.ndarray]
"""Stored rows [groups * 16, row bytes] to packed bytes: in order, of any shape."""


def _columns(width: int) -> Interleave:
    """Plain scalars of ``width`` bytes: [group, column, lane]."""

    def interleave(rows: np.ndarray) -> np.ndarray:
        cells = rows.reshape(-1, LANES, rows.shape[1] // width, width)
        return cells.transpose(0, 2, 1, 3)

    return interleave


def _blocks(rows: np.ndarray, block_bytes: int) -> np.ndarray:
    """[group, block, lane, byte of block]."""
    return rows.reshape(-1, LANES, rows.shape[1] // block_bytes, block_bytes).transpose(0, 2, 1, 3)


def _heads(blocks: np.ndarray, count: int) -> list[np.ndarray]:
    """The float16 fields before the quants, each [group, block, 16 lanes * 2 bytes]."""
    return [blocks[..., 2 * i : 2 * i + 2].reshape(*blocks.shape[:2], 2 * LANES) for i in range(count)]


def _q8_0(rows: np.ndarray) -> np.ndarray:
    blocks = _blocks(rows, 34)
    quants = blocks[..., 2:].transpose(0, 1, 3, 2).reshape(*blocks.shape[:2], _BLOCK * LANES)
    return np.concatenate([*_heads(blocks, 1), quants], axis=-1)


def _nibbles(fields: int) -> Interleave:
    """q4_0 (one float16 field) and q4_1 (two): byte j of a block holds columns j (low half) and j + 16 (high)."""

    def interleave(rows: np.ndarray) -> np.ndarray:
        blocks = _blocks(rows, 2 * fields + _BLOCK // 2)
        stored = blocks[..., 2 * fields :]
        columns = np.concatenate([stored & 15, stored >> 4], axis=-1)
        # Eight consecutive columns make four bytes, low half first: one little-endian word a row.
        pairs = columns[..., 0::2] | columns[..., 1::2] << 4
        words = pairs.reshape(*pairs.shape[:3], 4, 4).transpose(0, 1, 3, 2, 4)
        return np.concatenate([*_heads(blocks, fields), words.reshape(*blocks.shape[:2], -1)], axis=-1)

    return interleave


_FORMATS: Mapping[str, Interleave] = {
    "f32": _columns(4),
    "bf16": _columns(2),
    "f16": _columns(2),
    "q8_0": _q8_0,
    "q4_0": _nibbles(1),
    "q4_1": _nibbles(2),
}
MATRIX_LAYOUTS = tuple(_FORMATS)
VECTOR_LAYOUTS = tuple(_PLAIN)


def matrix_packing(layout: StorageLayout, shape: tuple[int, ...]) -> Packed:
    """The packing of a [rows, columns] weight stored as ``layout``; rows are filled up to a multiple of 16."""
    rows = -(-shape[0] // LANES) * LANES
    return Packed(f"{layout.name}_x16", rows * layout.row_bytes(shape[1]))


def vector_packing(shape: tuple[int, ...]) -> Packed:
    """The packing of a vector."""
    return Packed(VECTOR, 4 * shape[0])


def pack(packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview) -> np.ndarray:
    """The packed bytes (uint8) of one weight. Raises KernelError for an unknown packing, or data of the wrong size."""
    if len(memoryview(data).cast("B")) != layout.nbytes(shape):
        raise KernelError(
            f"a weight {list(shape)} stored as {layout.name} has {memoryview(data).nbytes} bytes",
            f"{layout.nbytes(shape)} were expected", "report this as a bug",
        )  # fmt: skip
    if packing == VECTOR and layout.name in _PLAIN:
        return _vector(layout.name, data).view(np.uint8)
    if packing != f"{layout.name}_x16" or layout.name not in _FORMATS or len(shape) != 2:
        raise KernelError(
            f"{layout.name} {list(shape)} cannot be packed as {packing}", "the CPU plugin knows no such packing"
        )
    rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
    missing = -shape[0] % LANES
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)])
    return np.ascontiguousarray(_FORMATS[layout.name](rows)).reshape(-1)


def _vector(name: str, data: bytes | memoryview) -> np.ndarray:
    values: np.ndarray = np.frombuffer(data, _PLAIN[name])
    if name == "bf16":
        # The upper half of a float32.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
