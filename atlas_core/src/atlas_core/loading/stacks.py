"""Weights of experts [experts, rows, columns], from one tensor for all of them or one for each."""

from collections.abc import Collection, Sequence
from math import prod

import numpy as np
from msgspec import Struct

from atlas_core.contracts.checkpoint import Checkpoint
from atlas_core.contracts.model import ExpertStack, WeightSource
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import TensorInfo


class FoundStack(Struct, frozen=True):
    """A stack bound to what a checkpoint has: ``names`` are one fused tensor, or one tensor for each expert."""

    stack: ExpertStack
    names: tuple[str, ...]
    fused: bool

    def info(self, checkpoint: Checkpoint, shape: tuple[int, ...]) -> TensorInfo:
        """What ``read`` gives, as if it were one tensor.

        Raises CheckpointError when the shape is not ``shape``, or the tensors of experts are stored in several ways.
        """
        stored = [checkpoint.tensors[name] for name in self.names]
        if self.fused:
            return self._fused_info(checkpoint, stored[0], shape)
        for info in stored:
            if info.shape != shape[1:] or info.layout != stored[0].layout:
                raise CheckpointError(
                    f"{info.name} in {checkpoint.path} does not fit among its fellow experts",
                    f"expected {list(shape[1:])} stored as {stored[0].layout}, found {list(info.shape)} as {info.layout}",
                    "config.json and the weights belong to different models",
                )
        if len(stored) != shape[0]:
            raise CheckpointError(
                f"the model asks for {shape[0]} experts like {stored[0].name}", f"its name map lists {len(stored)}",
                "report it to the plugin's authors",
            )  # fmt: skip
        return TensorInfo(stored[0].name, shape, stored[0].layout, sum(info.nbytes for info in stored))

    def read(self, checkpoint: Checkpoint) -> bytes | memoryview:
        """The matrices one behind another, rows outermost. Raises CheckpointError when the file cannot be read."""
        if not self.fused:
            out = bytearray(sum(checkpoint.tensors[name].nbytes for name in self.names))
            filled = 0
            for name in self.names:
                data = memoryview(checkpoint.read(name)).cast("B")
                out[filled : filled + len(data)] = data
                filled += len(data)
            return memoryview(out)
        info = checkpoint.tensors[self.names[0]]
        first, last = self.stack.part
        if self._transposed(info):
            return self._read_transposed(checkpoint, info)
        if (first, last) == (0, info.shape[1]):
            return checkpoint.read(info.name)
        experts, width = info.shape[0], info.nbytes // prod(info.shape[:2])
        picked = np.empty((experts, last - first, width), np.uint8)
        for expert in range(experts):
            matrix = np.frombuffer(checkpoint.read(info.name, [(expert, expert + 1)]), np.uint8)
            picked[expert] = matrix.reshape(-1, width)[first:last]
        return picked.reshape(-1).data

    def whole(self, checkpoint: Checkpoint) -> tuple[str, ...] | None:
        """The tensors whose bytes ``read`` puts one behind another; None when it takes parts of them, or turns them."""
        if not self.fused:
            return self.names
        info = checkpoint.tensors[self.names[0]]
        return self.names if not self._transposed(info) and self.stack.part == (0, info.shape[1]) else None

    def _fused_info(self, checkpoint: Checkpoint, info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
        expected = (shape[0], self.stack.fused_rows, shape[2])
        swapped = (shape[0], shape[2], self.stack.fused_rows)
        if info.shape not in (expected, swapped):
            raise CheckpointError(
                f"{info.name} in {checkpoint.path} has the wrong shape for a stack of experts",
                f"expected {list(expected)} or, transposed, {list(swapped)}, found {list(info.shape)}",
                "config.json and the weights belong to different models",
            )
        if self._transposed(info) and checkpoint.layout(info.layout).scalar is None:
            raise CheckpointError(
                f"{info.name} in {checkpoint.path} is stored transposed as {info.layout}",
                "blocks run along the stored rows, so that they cannot be turned",
                "use a checkpoint with one matrix for each expert",
            )
        layout = checkpoint.layout(info.layout)
        return TensorInfo(info.name, shape, info.layout, layout.nbytes(shape))

    def _transposed(self, info: TensorInfo) -> bool:
        """Whether matrices are stored as [columns, rows]; a square one is not."""
        return info.shape[1] != self.stack.fused_rows

    def _read_transposed(self, checkpoint: Checkpoint, info: TensorInfo) -> memoryview:
        scalar = checkpoint.layout(info.layout).scalar
        assert scalar is not None
        (first, last), kind = self.stack.part, np.dtype(f"V{scalar.itemsize}")
        picked = np.empty((info.shape[0], last - first, info.shape[1]), kind)
        for expert in range(info.shape[0]):
            matrix = np.frombuffer(checkpoint.read(info.name, [(expert, expert + 1)]), kind).reshape(info.shape[1:])
            picked[expert] = matrix[:, first:last].T
        return picked.reshape(-1).view(np.uint8).data


def find_stack(stack: ExpertStack, present: Collection[str]) -> FoundStack | None:
    """The first way of keeping the stack of which anything is present; None when nothing is.

    Raises CheckpointError naming experts that are missing beside others.
    """
    for name in stack.fused:
        if name in present:
            return FoundStack(stack, (name,), fused=True)
    for names in stack.separate:
        missing = [name for name in names if name not in present]
        if not missing:
            return FoundStack(stack, names, fused=False)
        if len(missing) < len(names):
            raise CheckpointError(
                f"{len(missing)} of {len(names)} experts are missing", listed(missing), "use a complete checkpoint"
            )
    return None


def computed_values(
    data: bytes | memoryview, tensor: TensorInfo, checkpoint: Checkpoint, source: WeightSource
) -> memoryview:
    """A plain array as the float32 that ``source`` makes of it. Raises CheckpointError for a block layout, and for a logarithm of none."""
    scalar = checkpoint.layout(tensor.layout).scalar
    if scalar is None:
        raise CheckpointError(
            f"{tensor.name}, from which a weight is computed, is stored as {tensor.layout}", "only plain arrays can be",
            "use another checkpoint of this model",
        )  # fmt: skip
    values = np.frombuffer(data, numpy_dtype(scalar)).astype(np.float32)
    if source.logarithm:
        if not (values < 0).all():
            raise CheckpointError(
                f"{tensor.name} has elements that are not below zero", "they are rates of decay", "use another file"
            )
        values = np.log(-values)
    return ((values + np.float32(source.offset)) * np.float32(source.factor)).view(np.uint8).data


def listed(items: Sequence[str], most: int = 8) -> str:
    """The first few, and how many more there are."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")
