"""Weights in storage layouts: what an implementation reads, and what the reference must compute with."""

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from atlas_core.contracts.quant import QuantFormat
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain

Array = np.ndarray[Any, Any]


class WeightCodec(Struct, frozen=True):
    """One layout with its bytes of float32 values, and the float32 values of bytes of a shape."""

    layout: StorageLayout
    encode: Callable[[Array], bytes]
    decode: Callable[[bytes, tuple[int, ...]], Array]

    @property
    def vectors(self) -> "WeightCodec":
        """The codec of one-dimensional weights beside matrices in this layout: quantised checkpoints keep them in float32."""
        return self if self.layout.scalar else plain_codec(DType.F32)


def plain_codec(dtype: DType) -> WeightCodec:
    """A plain array of ``dtype``."""
    kind = numpy_dtype(dtype)
    return WeightCodec(
        plain(dtype),
        lambda values: values.astype(kind).tobytes(),
        lambda data, shape: np.frombuffer(data, kind).astype(np.float32).reshape(shape),
    )


def plain_codecs() -> tuple[WeightCodec, ...]:
    """float32, bfloat16 and float16."""
    return tuple(plain_codec(dtype) for dtype in (DType.F32, DType.BF16, DType.F16))


def codecs_of(fmt: QuantFormat) -> tuple[WeightCodec, ...]:
    """Every layout that a quantisation format owns."""
    return tuple(_codec_of(fmt, layout) for layout in fmt.layouts)


def _codec_of(fmt: QuantFormat, layout: StorageLayout) -> WeightCodec:
    return WeightCodec(
        layout,
        lambda values: fmt.encode(layout.name, values),
        lambda data, shape: fmt.decode(layout.name, data, shape),
    )
