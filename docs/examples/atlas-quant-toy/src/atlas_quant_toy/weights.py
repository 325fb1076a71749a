"""``toy_q8``: blocks of 32 weights, a float32 scale and then 32 int8 numbers, little-endian."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict

TOY_Q8 = StorageLayout("toy_q8", block=32, block_bytes=36)
_BLOCK = np.dtype([("scale", "<f4"), ("codes", "i1", 32)])


class ToyFormat:
    """weight = scale × code, with scale = the block's largest magnitude / 127."""

    name = "toy"
    layouts: Sequence[StorageLayout] = (TOY_Q8,)

    def detect(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Verdict:
        """Yes when a tensor is stored so."""
        count = sum(info.layout == TOY_Q8.name for info in tensors.values())
        return Verdict.yes(0, f"{count} tensors are toy_q8") if count else Verdict.no("no tensor is stored as toy_q8")

    def decode(self, layout: str, data: bytes | memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of ``shape``. Raises CheckpointError on another layout or size."""
        self._own(layout)
        if len(data) != TOY_Q8.nbytes(shape):
            raise CheckpointError(
                f"a toy_q8 tensor of shape {shape} has {len(data)} bytes", f"{TOY_Q8.nbytes(shape)} bytes are expected"
            )
        blocks = np.frombuffer(data, _BLOCK)
        return (blocks["scale"][:, None] * blocks["codes"].astype(np.float32)).reshape(shape)

    def encode(self, layout: str, values: np.ndarray) -> bytes:
        """Nearest codes. Raises CheckpointError when rows are not whole blocks."""
        self._own(layout)
        if values.shape[-1] % TOY_Q8.block:
            raise CheckpointError(
                f"rows of {values.shape[-1]} cannot be toy_q8", f"{TOY_Q8.block} weights make a block"
            )
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, TOY_Q8.block)
        blocks = np.empty(len(rows), _BLOCK)
        blocks["scale"] = np.abs(rows).max(axis=1) / np.float32(127)
        safe = np.where(blocks["scale"] == 0, np.float32(1), blocks["scale"])
        blocks["codes"] = np.rint(rows / safe[:, None]).astype(np.int8)
        return blocks.tobytes()

    def error_bound(self, layout: str) -> float:
        """Half a step of 1/127, and the rounding of scale and product."""
        self._own(layout)
        return 0.5 / 127 + 2.0**-22

    def _own(self, layout: str) -> None:
        if layout != TOY_Q8.name:
            raise CheckpointError(f"the toy format has no layout {layout!r}", "it has toy_q8 only")
