"""Plain arrays: weights stored as float32, bfloat16 or float16."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlas_core.ops.arrays import numpy_dtype
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict

_SCALARS: Mapping[str, DType] = {"f32": DType.F32, "bf16": DType.BF16, "f16": DType.F16}
# Integer buffers (position ids, token maps) travel in plain checkpoints and are no weights.
_BUFFERS = frozenset({"i64", "i32", "bool"})


class PlainFormat:
    """One scalar a weight, little-endian, row by row."""

    name = "plain"
    layouts: Sequence[StorageLayout] = (plain(DType.F32), plain(DType.BF16), plain(DType.F16))

    def detect(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Verdict:
        """Yes when the checkpoint states no quantisation (``config`` is empty) and every tensor is plain."""
        if config:
            method = config.get("quant_method") or ", ".join(sorted(config))
            return Verdict.no(f"the checkpoint states a quantisation: {method}")
        for name, info in tensors.items():
            if info.layout not in _SCALARS and info.layout not in _BUFFERS:
                return Verdict.no(f"{name} is stored as {info.layout}")
        return Verdict.yes(0, "every tensor is a plain array")

    def decode(self, layout: str, data: bytes | memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of ``shape``; exact, since float32 holds every bfloat16 and float16. Raises CheckpointError on wrong size."""
        dtype = _dtype(layout)
        expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if len(data) != expected:
            raise CheckpointError(
                f"a {layout} tensor of shape {shape} has {len(data)} bytes",
                f"{expected} bytes are expected",
                "use an intact checkpoint",
            )
        return np.frombuffer(data, dtype).astype(np.float32).reshape(shape)

    def encode(self, layout: str, values: np.ndarray) -> bytes:
        """Nearest values, ties to even."""
        return np.ascontiguousarray(values, np.float32).astype(_dtype(layout)).tobytes()

    def error_bound(self, layout: str) -> float:
        """Half a unit in the last place; float16 has it for magnitudes from 2**-14 to 65504 only."""
        _dtype(layout)
        return {"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11}[layout]


def _dtype(layout: str) -> np.dtype[Any]:
    try:
        return numpy_dtype(_SCALARS[layout])
    except KeyError:
        raise CheckpointError(
            f"the plain format has no layout {layout!r}", f"it has {', '.join(_SCALARS)}", "ask the format that owns it"
        ) from None
