"""Products with FP8 and NVFP4 weights by warpgroups: any number of tokens, in tiles that the copy engine brings (scaled_tma.cu)."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, TensorMap, i32, ptr, tensor_map
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import ELEMENTS, addresses, live_word
from atlas_nvidia.implementations.linear import shared_out
from atlas_nvidia.implementations.scaled import FORMATS, Format, ScaledLinear
from atlas_nvidia.packing import CHUNK, CHUNK_BYTES, E4M3_UNITS, NVFP4_UNITS, UNIT

ROWS, PANEL, THREADS = 128, 64, 384
"""Weight rows of a tile, summed elements of a box of tokens, threads of a block."""
STAGES: Mapping[tuple[str, int], int] = {
    (E4M3_UNITS, 64): 6, (E4M3_UNITS, 128): 4, (NVFP4_UNITS, 64): 8, (NVFP4_UNITS, 128): 5,
}  # fmt: skip
"""TMA_STAGES by packing and tokens of a tile."""
FEW = 8
"""Tokens that streams of weights are faster for."""


class _Tile(Struct, frozen=True):
    """Tokens of a tile, and its rank for few, for up to as many, and for more."""

    tokens: int
    ranks: tuple[int, int, int]

    def rank(self, tokens: int) -> int:
        """For so many tokens."""
        return self.ranks[0 if tokens <= FEW else 1 if tokens <= PANEL else 2]


TILES = (_Tile(64, (60, 95, 60)), _Tile(128, (30, 30, 95)))


class ScaledTma(ScaledLinear):
    """Both ops; clusters share out the summed dimension of few tiles."""

    entry = "scaled_tma"

    def __init__(self, tile: _Tile, residual: bool, format_: Format, element: DType) -> None:
        self.tile = tile
        super().__init__(residual, f"scaled_tma_{tile.tokens}", f"scaled_tma_{tile.tokens}", format_, element)

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The rank depends on the number of tokens."""
        verdict = super().supports(need)
        return Verdict.yes(self.tile.rank(need.operands["x"].shape[0])) if verdict.ok else verdict

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        x, (rows, width) = need.operands["x"], need.operands["weight"].shape
        across, down = -(-x.shape[0] // self.tile.tokens), -(-rows // ROWS)
        splits = shared_out(across * down, -(-width // PANEL), context.workers)
        stage = self.tile.tokens * 2 * CHUNK + ROWS // UNIT * CHUNK_BYTES[self.format.packing]
        shared = STAGES[self.format.packing, self.tile.tokens] * stage
        tokens = TensorMap(context.operands["x"].address, (x.shape[0], width), (self.tile.tokens, PANEL), 2)
        residual = ptr(context.operands["residual"].address) if self.residual else ptr(0)
        args = [
            ptr(context.counts), live_word(x), tensor_map(tokens), *addresses(context, "weight"), residual,
            *addresses(context, "y"), i32(rows), i32(width), i32(int(need.operands["y"].dtype is DType.F32)),
        ]  # fmt: skip
        # Tokens vary fastest, so that blocks that run together share weights in the L2 cache.
        geometry = Geometry((across, down, splits), (THREADS, 1, 1), shared)
        return self.launch(context, geometry, args, cluster=(1, 1, splits))


def scaled() -> list[OpImplementation]:
    """All of them."""
    return [
        ScaledTma(tile, residual, each, element)
        for element in ELEMENTS
        for each in FORMATS
        for residual in (False, True)
        for tile in TILES
    ]
