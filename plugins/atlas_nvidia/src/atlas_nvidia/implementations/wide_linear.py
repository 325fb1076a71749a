"""Products with float32 weights, as some checkpoints keep their routers: two of bfloat16, whose weights sum up to 16 bits of mantissa."""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from msgspec.structs import replace

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, Buffer, OpImplementation, OpNeed, Packed
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_nvidia.implementations.base import Implementation, not_fast, not_stored, other_type, ragged, unbounded
from atlas_nvidia.implementations.linear import Linear, Streamed, Tiled

PAIR = "f32_as_bf16_pair"
"""The weights rounded to bfloat16, then what was left of each, rounded too: [2, rows, width]."""


class PairLinear(Implementation):
    """Two launches, the second onto the sums of the first. Choices of experts hang on the last digits of a router's logits."""

    op, name = "linear", "linear_f32_pair"

    def __init__(self) -> None:
        super().__init__(DType.BF16)
        self._ways: list[tuple[Linear, Linear]] = [
            *((Streamed(columns, False), Streamed(columns, True)) for columns in (8, 16, 32)),
            (Tiled(64, False), Tiled(64, True)),
        ]
        self.kernels = tuple(dict.fromkeys(kernel for first, _ in self._ways for kernel in first.kernels))

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, self.element, "x"), *other_type(need, DType.F32, "y"),
            *ragged(need, "x"), *unbounded(need, "x"), *not_stored(need, "weight", DType.F32.value),
        ]  # fmt: skip

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """See OpImplementation."""
        return {"weight": Packed(PAIR, 4 * prod(need.operands["weight"].shape))}

    def pack(
        self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview
    ) -> bytes | np.ndarray:
        """See OpImplementation. Raises KernelError for another packing."""
        if packing != PAIR or layout != plain(DType.F32):
            raise KernelError(
                f"{layout.name} cannot be packed as {packing}", f"{PAIR} is for f32", "report this as a bug"
            )
        kind, values = numpy_dtype(DType.BF16), np.frombuffer(data, np.float32)
        rounded = values.astype(kind)
        return np.stack([rounded, (values - rounded.astype(np.float32)).astype(kind)])

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        weight, buffer = need.operands["weight"], context.operands["weight"]
        half = Buffer(buffer.address, buffer.nbytes // 2)
        rest = Buffer(half.address + half.nbytes, half.nbytes)
        specs = {**need.operands, "weight": replace(weight, dtype=self.element, layout=plain(self.element))}
        alone = replace(need, operands=specs)
        onto = replace(need, op="linear_add", operands={**specs, "residual": need.operands["y"]})
        first, second = next(way for way in self._ways if way[0].supports(alone).ok and way[1].supports(onto).ok)
        operands = {**context.operands, "residual": context.operands["y"]}
        return (
            *first.bind(alone, replace(context, operands={**operands, "weight": half})),
            *second.bind(onto, replace(context, operands={**operands, "weight": rest})),
        )


ALL: tuple[OpImplementation, ...] = (PairLinear(),)
