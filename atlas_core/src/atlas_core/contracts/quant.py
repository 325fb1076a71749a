"""QuantFormat: how a family of formats stores numbers, and the numpy decode that is the truth about it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from atlas_core.contracts.checkpoint import Checkpoint
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict


class QuantFormat(Protocol):
    """One way to store weights. ``layouts`` are the storage layouts that it owns; every layout has one owner."""

    name: str
    layouts: Sequence[StorageLayout]

    def detect(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Verdict:
        """Whether this checkpoint stores weights so, from its quantization statement and tensor names."""
        ...

    def decode(self, layout: str, data: bytes | memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """float32 values of ``shape``, exactly as the format defines them. Raises CheckpointError on wrong size."""
        ...

    def encode(self, layout: str, values: np.ndarray) -> bytes:
        """The format's bytes for float32 ``values``; decode(encode(x)) is within ``error_bound``."""
        ...

    def error_bound(self, layout: str) -> float:
        """Largest |decode(encode(x)) - x| of a block, relative to the block's largest |x|."""
        ...


@runtime_checkable
class Assembling(Protocol):
    """What a QuantFormat may offer besides, whose weights are stored in several tensors: codes, scales, zero points."""

    def assemble(self, checkpoint: Checkpoint) -> Checkpoint:
        """``checkpoint`` with each such weight as one tensor of a layout of this format; itself where there is none.

        It is asked of every checkpoint, in whatever container, before formats are detected and weights are looked for, so it judges by
        names and types of tensors, and reads none. Raises CheckpointError where parts of a weight do not fit together.
        """
        ...
