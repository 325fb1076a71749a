"""Physical scalar types as numpy types, rounding to them, and caches as they lie in memory."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from atlas_core.contracts.ops import KVLayout
from atlas_core.vocab.dtype import DType

_NUMPY: Mapping[DType, np.dtype[Any]] = {
    DType.F32: np.dtype("<f4"), DType.F64: np.dtype("<f8"), DType.F16: np.dtype("<f2"),
    DType.I64: np.dtype("<i8"), DType.I32: np.dtype("<i4"), DType.I16: np.dtype("<i2"), DType.I8: np.dtype("i1"),
    DType.U64: np.dtype("<u8"), DType.U32: np.dtype("<u4"), DType.U16: np.dtype("<u2"), DType.U8: np.dtype("u1"),
    DType.BOOL: np.dtype("?"),
}  # fmt: skip
_FLOATING = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16, DType.F8E4M3, DType.F8E5M2})


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The little-endian numpy type of a scalar."""
    return _NUMPY.get(dtype) or _added()[dtype]


@cache
def _added() -> Mapping[DType, np.dtype[Any]]:
    """Types that numpy does not have. The package that does is loaded with the first array of one."""
    import ml_dtypes

    return {
        DType.BF16: np.dtype(ml_dtypes.bfloat16),
        DType.F8E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
        DType.F8E5M2: np.dtype(ml_dtypes.float8_e5m2),
    }


def floating(dtype: DType) -> bool:
    """Whether values of the type are in float, so that references see them as float32."""
    return dtype in _FLOATING


def rounded(array: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """float32 values that ``dtype`` can hold, nearest with ties to even; integer arrays unchanged."""
    if not floating(dtype) or array.dtype.kind in "iub":
        return array
    return array.astype(numpy_dtype(dtype)).astype(np.float32)


def laid_out(cache: np.ndarray[Any, Any], layout: KVLayout) -> np.ndarray[Any, Any]:
    """A cache [layer, page, 2, head, token, dim] as it lies in memory; a copy of equal shape."""
    *outer, tokens, dim = cache[:, :, 0].shape
    result, tile = cache.copy(), layout.key_tile
    keys = cache[:, :, 0].reshape(*outer, tokens // tile, tile, dim).swapaxes(-1, -2)
    result[:, :, 0] = keys.reshape(*outer, tokens, dim)
    return result.swapaxes(0, 1).reshape(cache.shape) if layout.layers_together else result


def by_layer(memory: np.ndarray[Any, Any], layout: KVLayout) -> np.ndarray[Any, Any]:
    """The inverse of ``laid_out``."""
    layers, pages, *page = memory.shape
    result = memory.reshape(pages, layers, *page).swapaxes(0, 1).copy() if layout.layers_together else memory.copy()
    *outer, tokens, dim = result[:, :, 0].shape
    tile = layout.key_tile
    keys = result[:, :, 0].reshape(*outer, tokens // tile, dim, tile).swapaxes(-1, -2)
    result[:, :, 0] = keys.reshape(*outer, tokens, dim)
    return result
