"""How weights lie in memory for the CPU's kernels: rows in groups of 16, interleaved so that one load brings a column.

``weights.h`` is the reader. Packing again or for another op gives the same bytes, so tied weights share one copy.
"""

from collections.abc import Mapping

import numpy as np

from atlas_core.contracts.backend import GpuBackend, Launch
from atlas_core.contracts.ops import Packed, Repack
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Geometry, i32, i64, ptr
from atlas_core.vocab.layout import StorageLayout
from atlas_plugin_cpu.interleave import INTERLEAVE, LANES

VECTOR = "f32"
"""Packing of weights that are vectors (norms, biases): plain float32."""

_PLAIN: Mapping[str, np.dtype[np.generic]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


MATRIX_LAYOUTS = tuple(INTERLEAVE)
VECTOR_LAYOUTS = tuple(_PLAIN)
# Bytes of a block of one row that the packing adds: six-bit factors get a byte each.
_WIDER: Mapping[str, int] = {"q4_k": 4, "q5_k": 4, "iq4_xs": 2}


def matrix_packing(layout: StorageLayout, shape: tuple[int, ...]) -> Packed:
    """The packing of a [rows, columns] weight stored as ``layout``; rows are filled up to a multiple of 16."""
    rows = -(-shape[0] // LANES) * LANES
    wider = shape[1] // layout.block * _WIDER.get(layout.name, 0)
    return Packed(f"{layout.name}_x16", rows * (layout.row_bytes(shape[1]) + wider))


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
    if packing != f"{layout.name}_x16" or layout.name not in INTERLEAVE or len(shape) != 2:
        raise KernelError(
            f"{layout.name} {list(shape)} cannot be packed as {packing}", "the CPU plugin knows no such packing"
        )
    rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
    missing = -shape[0] % LANES
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)])
    return np.ascontiguousarray(INTERLEAVE[layout.name](rows)).reshape(-1)


def repack(packing: str, layout: StorageLayout, shape: tuple[int, ...]) -> Repack | None:
    """The same by kernels: ``pack_rows`` for matrices (and stacks of them whose groups of rows do not straddle two)."""
    if packing == VECTOR and layout.name == "f32" and len(shape) == 1:
        return Repack(
            1, 4 * shape[0], lambda backend, source, order, target, rows: _copy(backend, source, target, 4 * shape[0])
        )
    if packing != f"{layout.name}_x16" or layout.name not in INTERLEAVE or len(shape) < 2:
        return None
    if len(shape) > 2 and shape[-2] % LANES:
        return None
    row_bytes, number = layout.row_bytes(shape[-1]), MATRIX_LAYOUTS.index(layout.name)

    def launch(backend: GpuBackend, source: int, order: int, target: int, rows: int) -> Launch:
        arguments = (ptr(source), ptr(order), ptr(target), i64(row_bytes), i32(rows), i32(number))
        return backend.prepare_launch(backend.kernel("packing", "pack_rows"), Geometry(grid=(0, 1, 1)), arguments)

    return Repack(LANES, matrix_packing(layout, (LANES, shape[-1])).nbytes, launch)


def _copy(backend: GpuBackend, source: int, target: int, nbytes: int) -> Launch:
    arguments = ptr(target), ptr(source), i64(nbytes)
    return backend.prepare_launch(backend.kernel("executor", "memory_copy"), Geometry(), arguments)


def _vector(name: str, data: bytes | memoryview) -> np.ndarray:
    values: np.ndarray = np.frombuffer(data, _PLAIN[name])
    if name == "bf16":
        # The upper half of a float32.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
