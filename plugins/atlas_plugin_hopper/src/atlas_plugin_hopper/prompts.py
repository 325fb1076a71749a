"""Products of prompts by the tensor memory accelerator."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, TensorMap, i32, ptr, tensor_map
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import ELEMENTS, addresses, live_word
from atlas_nvidia.implementations.linear import Linear
from atlas_plugin_hopper.tiles import Normed

GROUP, DEPTH, PEERS = 64, 64, 2
"""Tokens of a warpgroup, summed elements of a stage, and blocks of the cluster that shares what it fetches (prompt_product.cuh)."""
WARPGROUP = 128
CLUSTERS = 66
"""That run at once on 132 processors."""
FULL = 0.7
"""Share of them that must be busy on average for these tiles to be the fastest: others fill the machine with fewer tokens."""
BEHIND = 1.35
"""What it costs that a box of tokens lies wholly behind the last: the copy engine takes longer for it than for others."""
HANDOVER = 10
"""Steps of the summed dimension that take as long as it takes to hand sums over from one cluster to another."""


class Tiles(Struct, frozen=True):
    """One instance: tokens and weight rows of a tile, stages of the ring, what a sum costs beside one of the widest tiles.

    The blocks of a cluster have the same weights and neighbouring tokens; with ``same_tokens`` those, and neighbouring weights.
    ``parts`` clusters share out the summed dimension of a tile. What is done with sums takes as long as ``ending`` steps of a tile, and
    ``once`` more behind the last; ``staged`` ones lie in shared memory then. ``box`` weight rows are copied at once, if not a block's share. A warpgroup has ``each`` groups of tokens.
    """

    tokens: int
    rows: int
    stages: int
    cost: float
    parts: int = 1
    ending: int = 0
    once: int = 0
    staged: bool = False
    box: int = 0
    same_tokens: bool = False
    each: int = 1

    @property
    def shared(self) -> int:
        """Bytes of the ring, and of staged sums behind it."""
        sums = 2 * self.tokens * self.rows if self.staged else 0
        return self.stages * (self.tokens + self.rows) * DEPTH * 2 + sums

    @property
    def share(self) -> int:
        """Weight rows that a block of the cluster fetches, at once."""
        return self.box or (self.rows if self.same_tokens else self.rows // PEERS)

    @property
    def span(self) -> int:
        """Tokens of a cluster."""
        return self.tokens if self.same_tokens else PEERS * self.tokens

    @property
    def threads(self) -> int:
        """Of a block: warpgroups that multiply, and one that copies."""
        return (-(-self.tokens // (GROUP * self.each)) + 1) * WARPGROUP

    def pairs(self, tokens: int, columns: int) -> int:
        """What a cluster takes at once, all in all."""
        across = -(-columns // PEERS) if self.same_tokens else columns
        return -(-tokens // self.span) * across * self.parts

    def busy(self, tokens: int, rows: int) -> float:
        """Share of the clusters that work, on average."""
        pairs = self.pairs(tokens, -(-rows // self.rows))
        return pairs / (-(-pairs // CLUSTERS) * CLUSTERS)

    def time(self, tokens: int, rows: int, width: int) -> float:
        """For products of ``rows`` with ``width`` elements of each token: what a block sums up, one thing after another."""
        rounds = -(-self.pairs(tokens, -(-rows // self.rows)) // CLUSTERS)
        steps = -(-width // DEPTH) / self.parts + (HANDOVER if self.parts > 1 else 0) + self.ending
        behind = self.same_tokens and 0 < tokens % self.tokens <= self.tokens // PEERS
        return (rounds * steps + self.once) * self.tokens * self.rows * self.cost * (BEHIND if behind else 1)

    def geometry(self, tokens: int, columns: int, workers: int) -> Geometry:
        """Clusters as many as the machine holds, or as there are pairs of tiles."""
        clusters = min(self.pairs(tokens, columns), workers // PEERS)
        return Geometry((PEERS * clusters, 1, 1), (self.threads, 1, 1), self.shared)

    def handed(self, tokens: int, columns: int) -> int:
        """Sums that all clusters together hand over, at most."""
        if self.parts == 1:
            return 0
        return -(-tokens // self.span) * self.span * columns * self.rows


WIDE, NARROW = Tiles(128, 256, 4, 1.0), Tiles(128, 128, 6, 1.1)
NARROW_PARTS, TALL_PARTS = Tiles(128, 128, 6, 1.1, parts=2), Tiles(192, 128, 5, 1.05, parts=2, same_tokens=True)
LEAN = Tiles(128, 96, 7, 1.35, same_tokens=True)
INSTANCES: Mapping[Tiles, str] = {
    WIDE: "linear_tma",
    NARROW: "linear_tma_128",
    NARROW_PARTS: "linear_tma_128_parts",
    TALL_PARTS: "linear_tma_192_parts",
    LEAN: "linear_tma_96",
}
"""Modules of linear_tma.cu."""
FLAG_TOKENS = 16
"""Tokens of a warp, which hands its sums over with a flag for each part."""


def tokens_map(address: int, tokens: int, width: int, tiles: Tiles) -> Arg:
    """The tokens of an activation that a block fetches at once."""
    box = tiles.tokens // PEERS if tiles.same_tokens else tiles.tokens
    return tensor_map(TensorMap(address, (tokens, width), (box, DEPTH), 2))


def weight_map(need: OpNeed, context: BindContext, name: str, tiles: Tiles) -> Arg:
    """The rows of a matrix that a block fetches at once."""
    return tensor_map(TensorMap(context.operands[name].address, need.operands[name].shape, (tiles.share, DEPTH), 2))


def _columns(tiles: Tiles, need: OpNeed) -> int:
    """Tiles of weight rows."""
    return -(-need.operands["weight"].shape[0] // tiles.rows)


def handed_bytes(tiles: Tiles, need: OpNeed) -> int:
    """Scratch for sums that clusters hand over."""
    return 4 * tiles.handed(need.operands["x"].shape[0], _columns(tiles, need))


def squares_of(tiles: Tiles, need: OpNeed) -> int:
    """Sums of squares of each token that ``multiply`` leaves for a norm behind it."""
    return tiles.parts * _columns(tiles, need)


def multiply(
    tiles: Tiles, module: str, need: OpNeed, context: BindContext, handed: int, norm: Normed | None = None, *,
    overlap: bool = True,
) -> Launch:  # fmt: skip
    """x · weightᵀ into y, on top of ``residual`` where there is one; and what a norm behind it makes of that.

    ``handed`` is where sums are handed over, ``handed_bytes`` of them. Without ``overlap`` the predecessor may write the weight.
    """
    tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
    columns = _columns(tiles, need)
    residual = ptr(context.operands["residual"].address) if "residual" in need.operands else ptr(0)
    handover = [ptr(0), ptr(0)]
    if sums := tiles.handed(tokens, columns):
        flags = tiles.parts * sums // (FLAG_TOKENS * tiles.rows)
        handover = [ptr(handed), ptr(context.keep(bytes(4 * flags)))]
    behind = [*addresses(context, "norm_weight"), ptr(norm.address), ptr(norm.squares)] if norm else [ptr(0)] * 3
    args = [
        ptr(context.counts), live_word(need.operands["x"]), tokens_map(context.operands["x"].address, tokens, width, tiles),
        weight_map(need, context, "weight", tiles), residual, *addresses(context, "y"), *handover, *behind,
        i32(rows), i32(width), i32(int(need.operands["y"].dtype is DType.F32)),
    ]  # fmt: skip
    return launched(context, (module, "linear_tma"), tiles, tokens, columns, args, overlap=overlap)


def launched(
    context: BindContext, kernel: tuple[str, str], tiles: Tiles, tokens: int, columns: int, args: Sequence[Arg], *,
    overlap: bool = True,
) -> Launch:  # fmt: skip
    """A kernel of prompt_product.cuh over ``columns`` tiles of weight rows. It may begin before its predecessor ends: it waits by itself."""
    geometry = tiles.geometry(tokens, columns, context.workers)
    attrs = LaunchAttrs(overlap=overlap, cluster=(PEERS, 1, 1))
    return context.backend.prepare_launch(context.backend.kernel(*kernel), geometry, args, attrs)


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
        tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
        order = sorted(INSTANCES, key=lambda tiles: tiles.time(tokens, rows, width)).index(self.tiles)
        # Both blocks of a cluster have tokens, and the last rounds of all clusters are not in vain.
        fills = tokens > self.tiles.tokens and self.tiles.busy(tokens, rows) >= FULL
        return Verdict.yes(30 if fills and not order else 4 - order)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        rows = need.operands["weight"].shape[0]
        reasons = [*super().refusals(need), *([f"{rows} weight rows are no multiple of 4"] if rows % 4 else [])]
        if self.tiles.parts * DEPTH > need.operands["weight"].shape[1]:
            reasons.append(f"the summed dimension is shared out in {self.tiles.parts} parts of {DEPTH} at least")
        return reasons

    def scratch_bytes(self, need: OpNeed) -> int:
        """Sums that clusters hand over."""
        return handed_bytes(self.tiles, need)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        return (multiply(self.tiles, self.module, need, context, context.scratch.address),)


def products() -> list[OpImplementation]:
    """All of them."""
    return [
        CopiedByEngine(tiles, residual, element)
        for element in ELEMENTS
        for residual in (False, True)
        for tiles in INSTANCES
    ]
