"""Physical scalar types as numpy types, and rounding to them."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

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


def tiled_keys(cache: np.ndarray[Any, Any], tile: int) -> np.ndarray[Any, Any]:
    """A cache [..., 2, head, token, dim] with its keys as a KVLayout of this ``key_tile`` has them; a copy of equal shape."""
    result = cache.copy()
    keys = cache[..., 0, :, :, :]
    *outer, tokens, dim = keys.shape
    result[..., 0, :, :, :] = keys.reshape(*outer, tokens // tile, tile, dim).swapaxes(-1, -2).reshape(keys.shape)
    return result


def untiled_keys(cache: np.ndarray[Any, Any], tile: int) -> np.ndarray[Any, Any]:
    """The inverse of ``tiled_keys``."""
    result = cache.copy()
    keys = cache[..., 0, :, :, :]
    *outer, tokens, dim = keys.shape
    result[..., 0, :, :, :] = keys.reshape(*outer, tokens // tile, dim, tile).swapaxes(-1, -2).reshape(keys.shape)
    return result
