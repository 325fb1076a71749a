"""Products of prompts by the tensor memory accelerator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, TensorMap, i32, ptr, tensor_map
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import ELEMENTS, live_word
from atlas_nvidia.implementations.linear import Linear

TOKENS, DEPTH, PEERS = 128, 64, 2
"""Of a block's tile, and blocks of the cluster that shares weights (prompt_product.cuh)."""
THREADS = 384
CLUSTERS = 66
"""That run at once on 132 processors."""
FULL = 0.7
"""Share of them that must be busy on average for these tiles to be the fastest: others fill the machine with fewer tokens."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """One instance: weight rows of a tile, stages of the ring, and what a row costs beside one of the widest tiles."""

    rows: int
    stages: int
    cost: float

    @property
    def shared(self) -> int:
        """Bytes of the ring."""
        return self.stages * (TOKENS + self.rows) * DEPTH * 2

    @property
    def share(self) -> int:
        """Weight rows that a block of the cluster fetches."""
        return self.rows // PEERS

    def pairs(self, tokens: int, columns: int) -> int:
        """What a cluster takes at once, all in all."""
        return -(-tokens // (PEERS * TOKENS)) * columns

    def busy(self, tokens: int, rows: int) -> float:
        """Share of the clusters that work, on average."""
        pairs = self.pairs(tokens, -(-rows // self.rows))
        return pairs / (-(-pairs // CLUSTERS) * CLUSTERS)

    def time(self, tokens: int, rows: int) -> float:
        """In rows of the widest tiles that a cluster multiplies one after another."""
        return -(-self.pairs(tokens, -(-rows // self.rows)) // CLUSTERS) * self.rows * self.cost

    def geometry(self, tokens: int, columns: int, workers: int) -> Geometry:
        """Clusters as many as the machine holds, or as there are pairs of tiles."""
        return Geometry(
            (PEERS * min(self.pairs(tokens, columns), workers // PEERS), 1, 1), (THREADS, 1, 1), self.shared
        )


WIDE, NARROW = Tiles(256, 4, 1.0), Tiles(128, 6, 1.15)
INSTANCES: Mapping[Tiles, str] = {WIDE: "linear_tma", NARROW: "linear_tma_128"}
"""Modules of linear_tma.cu."""


def tokens_map(address: int, tokens: int, width: int) -> Arg:
    """A block's tokens of an activation."""
    return tensor_map(TensorMap(address, (tokens, width), (TOKENS, DEPTH), 2))


def weight_map(need: OpNeed, context: BindContext, name: str, tiles: Tiles) -> Arg:
    """A block's share of a matrix."""
    return tensor_map(TensorMap(context.operands[name].address, need.operands[name].shape, (tiles.share, DEPTH), 2))


class CopiedByEngine(Linear):
    """Hundreds of tokens and more: persistent clusters of two blocks that share the weights they fetch."""

    entry = "linear_tma"

    def __init__(self, tiles: Tiles, residual: bool, element: DType = DType.BF16) -> None:
        self.tiles = tiles
        module = INSTANCES[tiles]
        super().__init__(residual, module.removeprefix("linear_"), module, element)

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The rank depends on how well the tiles fill the machine."""
        verdict = super().supports(need)
        if not verdict.ok:
            return verdict
        tokens, rows = need.operands["x"].shape[0], need.operands["weight"].shape[0]
        best = min(INSTANCES, key=lambda tiles: tiles.time(tokens, rows)) is self.tiles
        fills = self.tiles.busy(tokens, rows) >= FULL
        return Verdict.yes((30 if fills else 4) if best else 3)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        rows = need.operands["weight"].shape[0]
        return [*super().refusals(need), *([f"{rows} weight rows are no multiple of 4"] if rows % 4 else [])]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
        geometry = self.tiles.geometry(tokens, -(-rows // self.tiles.rows), context.workers)
        residual = context.operands["residual"].address if self.residual else 0
        args = [
            ptr(context.counts), live_word(need.operands["x"]), tokens_map(context.operands["x"].address, tokens, width),
            weight_map(need, context, "weight", self.tiles), ptr(residual), ptr(context.operands["y"].address), i32(rows),
            i32(width), i32(int(need.operands["y"].dtype is DType.F32)),
        ]  # fmt: skip
        return self.launch(context, geometry, args, cluster=(PEERS, 1, 1))


def products() -> list[OpImplementation]:
    """All of them."""
    return [
        CopiedByEngine(tiles, residual, element)
        for element in ELEMENTS
        for residual in (False, True)
        for tiles in INSTANCES
    ]
