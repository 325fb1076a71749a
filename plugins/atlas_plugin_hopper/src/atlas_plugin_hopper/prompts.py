"""Products of prompts by the tensor memory accelerator."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, TensorMap, i32, ptr, tensor_map
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import live_word
from atlas_nvidia.implementations.linear import Linear

TOKENS, ROWS, DEPTH, PEERS, STAGES = 128, 256, 64, 2, 4
"""Of a block's tile, of the cluster that shares weights, and of the ring in shared memory (linear_tma.cu)."""
THREADS = 384
CLUSTERS = 66
"""That run at once on 132 processors."""
FULL = 0.7
"""Share of them that must be busy on average for these tiles to be the fastest: smaller ones fill the machine with fewer tokens."""


class CopiedByEngine(Linear):
    """Hundreds of tokens and more: persistent clusters of two blocks that share the weights they fetch."""

    entry = "linear_tma"

    def __init__(self, residual: bool, element: DType = DType.BF16) -> None:
        super().__init__(residual, "tma", "linear_tma", element)

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The rank depends on how well the tiles fill the machine."""
        verdict = super().supports(need)
        if not verdict.ok:
            return verdict
        tiles = _pairs_of_tiles(need.operands["x"].shape[0], need.operands["weight"].shape[0])
        busy = tiles / (-(-tiles // CLUSTERS) * CLUSTERS)
        return Verdict.yes(30 if busy >= FULL else 4)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        rows = need.operands["weight"].shape[0]
        return [*super().refusals(need), *([f"{rows} weight rows are no multiple of 4"] if rows % 4 else [])]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
        pairs = _pairs_of_tiles(tokens, rows)
        shared = STAGES * (TOKENS + ROWS) * DEPTH * 2
        geometry = Geometry((PEERS * min(pairs, context.workers // PEERS), 1, 1), (THREADS, 1, 1), shared)
        x = TensorMap(context.operands["x"].address, (tokens, width), (TOKENS, DEPTH), 2)
        weight = TensorMap(context.operands["weight"].address, (rows, width), (ROWS // PEERS, DEPTH), 2)
        residual = context.operands["residual"].address if self.residual else 0
        args = [
            ptr(context.counts), live_word(need.operands["x"]), tensor_map(x), tensor_map(weight), ptr(residual),
            ptr(context.operands["y"].address), i32(rows), i32(width), i32(int(need.operands["y"].dtype is DType.F32)),
        ]  # fmt: skip
        return self.launch(context, geometry, args, cluster=(PEERS, 1, 1))


def _pairs_of_tiles(tokens: int, rows: int) -> int:
    """What a cluster takes at once, all in all."""
    return -(-tokens // (PEERS * TOKENS)) * -(-rows // ROWS)
