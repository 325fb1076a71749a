"""Products of prompts with their experts by the tensor memory accelerator."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, TensorMap, i32, tensor_map
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import addresses
from atlas_nvidia.implementations.moe import Sorted

TOKENS, ROWS, DEPTH, STAGES, THREADS = 128, 256, 64, 4, 384
"""Of a block's tile, of the ring in shared memory, of a block (moe_tma.cu)."""
FEWEST = 64
"""Choices of an expert from which on it is the fastest."""


class SortedByEngine(Sorted):
    """Persistent blocks, tiles of 128 choices and 256 weight rows."""

    gemm_entries = ("moe_tma_gate_up", "moe_tma_down")

    def __init__(self, op: str, element: DType = DType.BF16) -> None:
        super().__init__(TOKENS, op, element)

    def variant(self) -> str:
        """See Sorted."""
        return "tma"

    def gemm_module(self) -> str:
        """See Sorted."""
        return "moe_tma"

    def gemm_shared(self) -> int:
        """See Sorted."""
        return STAGES * (TOKENS + ROWS) * DEPTH * 2

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The rank depends on the number of choices an expert."""
        verdict = super().supports(need)
        each = self.choices(need) / need.operands["gate"].shape[0]
        return Verdict.yes(30 if each >= FEWEST else 5) if verdict.ok else verdict

    def products(
        self, need: OpNeed, context: BindContext, order: Arg, tiles: Arg, inner: Arg, outer: Arg
    ) -> Sequence[Launch]:
        """See Sorted."""
        experts, size, hidden = need.operands["gate"].shape
        most = self.most(need)

        def matrix(name: str, rows: int, width: int, box: int) -> Arg:
            return tensor_map(TensorMap(context.operands[name].address, (experts * rows, width), (box, DEPTH), 2))

        def geometry(columns: int) -> Geometry:
            return Geometry((min(most * columns, context.workers), 1, 1), (THREADS, 1, 1), self.gemm_shared())

        gate_up, down = self.gemm_entries
        between = tensor_map(TensorMap(int(inner.value), (self.choices(need), size), (TOKENS, DEPTH), 2))
        return (
            *self.launch_of(
                context, self.gemm, gate_up, geometry(-(-size // (ROWS // 2))),
                [
                    tiles, order, *addresses(context, "x", "weights"), matrix("gate", size, hidden, ROWS // 2),
                    matrix("up", size, hidden, ROWS // 2), inner, i32(hidden), i32(size),
                    i32(need.operands["experts"].shape[1]), i32(most),
                ],
            ),
            *self.launch_of(
                context, self.gemm, down, geometry(-(-hidden // ROWS)),
                [tiles, order, between, matrix("down", hidden, size, ROWS), outer, i32(hidden), i32(size), i32(most)],
            ),
        )  # fmt: skip
