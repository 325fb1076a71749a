"""Weights for a benchmark, as ``--load-format dummy`` makes them up (see atlas_core.loading.drawn), by their canonical names."""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from atlas_core.contracts.ops import Buffer
from atlas_core.loading.drawing import draw
from atlas_core.loading.drawn import deviation, stretches, vector
from atlas_core.model.program import Value
from atlas_core.ops.scaled import E4M3_TILE, NVFP4
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_nvidia.implementations import expert_codes
from atlas_nvidia.packing import CHUNK_BYTES, E4M3_UNITS, NVFP4_UNITS, UNIT, extents

SEED = 1
STORED = {"bf16": plain(DType.BF16), "fp8": E4M3_TILE, "nvfp4": NVFP4}
"""How the matrices of layers may be stored."""
_SPREADS = {E4M3_UNITS: 16.0, NVFP4_UNITS: 2.7}
"""Deviation of the numbers of pieces whose scales are one: of uniform codes of NVFP4 what it is, since a bit of any code may lie anywhere."""
_PIECES = 4096


def layouts(weights: Iterable[Value], stored: str) -> dict[str, StorageLayout]:
    """By name: matrices of layers are ``stored`` so, one of STORED, routers and everything else are bfloat16."""

    def matrix(weight: Value) -> bool:
        return len(weight.shape) > 1 and weight.name.startswith("layers.") and not weight.name.endswith(".router")

    return {weight.name: STORED[stored if matrix(weight) else "bf16"] for weight in weights}


def fill(backend: Any, weights: Mapping[tuple[str, str], Buffer], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fills ``weights``, by name and packing: bfloat16, and FP8 and NVFP4 as they are packed."""
    matrices, pools = [], {}
    stream = backend.create_stream()
    for (name, packing), buffer in weights.items():
        shape = shapes[name]
        if packing in CHUNK_BYTES:
            if packing not in pools:
                pieces = _pieces(packing)
                pools[packing] = backend.alloc(pieces.nbytes)
                backend.copy_h2d(pieces.data, pools[packing])
            _fill_units(backend, stream, name, packing, buffer.address, shape, pools[packing])
        elif packing in expert_codes.PACKINGS.values():
            _fill_experts(backend, stream, packing, buffer.address, shape, deviation(name, shape))
        elif len(shape) == 1:
            values = vector(SEED, name, buffer.nbytes // 2).astype(ml_dtypes.bfloat16)
            backend.copy_h2d(values.tobytes(), buffer.address)
        else:
            matrices.append((buffer.address, [*stretches(SEED, name, deviation(name, shape), 0, buffer.nbytes // 2)]))
    backend.synchronize(stream)
    for pool in pools.values():
        backend.free(pool)
    draw(backend, matrices)


@cache
def _pieces(packing: str) -> np.ndarray:
    """2 _PIECES pieces of normal numbers of the packing's spread, scales of NVFP4 being one (atlas_nvidia.packing)."""
    rng = np.random.default_rng(SEED)
    pieces = np.empty((2 * _PIECES, CHUNK_BYTES[packing]), np.uint8)
    if packing == E4M3_UNITS:
        values = rng.standard_normal(pieces.shape, np.float32) * np.float32(_SPREADS[packing])
        pieces[...] = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        pieces[:, :512] = rng.integers(0, 256, (2 * _PIECES, 512), np.uint8)
        pieces[:, 512:] = 16 << 3
    return pieces


def _fill_units(
    backend: Any, stream: Any, name: str, packing: str, address: int, shape: tuple[int, ...], pool: int
) -> None:
    (units, chunks), each = extents(shape), CHUNK_BYTES[packing]
    spread = deviation(name, shape) / _SPREADS[packing]
    by_row = np.full(units * UNIT, 1 if packing == E4M3_UNITS else 512 * spread, np.float32)
    scales = np.concatenate([np.full(units * chunks, spread, np.float32), by_row]) if packing == E4M3_UNITS else by_row
    for matrix in range(prod(shape[:-2])):
        left = units * chunks
        while left:
            key = hashlib.sha256(f"{name} {matrix} {left}".encode()).digest()
            start, count = int.from_bytes(key[:4], "little") % _PIECES, min(left, _PIECES)
            backend.copy_d2d_async(pool + start * each, address, count * each, stream)
            address, left = address + count * each, left - count
        backend.copy_h2d(scales.data.cast("B"), address)
        address += scales.nbytes


@cache
def _rows(packing: str, row: int) -> tuple[np.ndarray, float, np.ndarray]:
    """Bytes of _PIECES rows of codes, the deviation of their numbers, and scales of one."""
    rng = np.random.default_rng(SEED)
    if packing == expert_codes.E2M1:
        return rng.integers(0, 256, _PIECES * row, np.uint8), _SPREADS[NVFP4_UNITS], np.full(1 << 20, 0x38, np.uint8)
    values = rng.standard_normal(_PIECES * row, np.float32) * np.float32(_SPREADS[E4M3_UNITS])
    codes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, _SPREADS[E4M3_UNITS], np.ones(1 << 18, np.float32).view(np.uint8)


def _fill_experts(backend: Any, stream: Any, packing: str, address: int, shape: tuple[int, ...], spread: float) -> None:
    """Codes of some rows over and over, scales of one, and factors that make the spread."""
    codes_end, scales_end, factors_from, end = expert_codes.sections(packing, shape)
    codes, number, one = _rows(packing, codes_end // prod(shape[:-1]))
    for some, first, last in ((codes, 0, codes_end), (one, codes_end, scales_end)):
        backend.copy_h2d(some[: last - first].data, address + first)
        for at in range(first + len(some), last, len(some)):
            backend.copy_d2d_async(address + first, address + at, min(len(some), last - at), stream)
    factors = np.full((end - factors_from) // 4, spread / number, np.float32)
    backend.copy_h2d(factors.view(np.uint8).data, address + factors_from)
