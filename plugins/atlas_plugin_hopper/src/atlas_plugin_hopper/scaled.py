"""Products with FP8 and NVFP4 weights by warpgroups, in tiles that the copy engine brings (scaled_tma.cu), or of matrices decoded first."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, Buffer, OperandSpec, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, TensorMap, i32, ptr, tensor_map
from atlas_core.vocab.layout import plain
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import ELEMENTS, addresses, live_word
from atlas_nvidia.implementations.scaled import FORMATS, Format, ScaledLinear
from atlas_nvidia.packing import CHUNK, CHUNK_BYTES, E4M3_UNITS, NVFP4_UNITS, UNIT, extents
from atlas_plugin_hopper.prompts import INSTANCES, Tiles, handed_bytes, multiply

ROWS, PANEL, THREADS = 128, 64, 384
"""Weight rows of a tile, summed elements of a box of tokens, threads of a block."""
STAGES: Mapping[tuple[str, int], int] = {
    (E4M3_UNITS, 64): 6, (E4M3_UNITS, 128): 4, (NVFP4_UNITS, 64): 8, (NVFP4_UNITS, 128): 5,
}  # fmt: skip
"""TMA_STAGES by packing and tokens of a tile."""
MANY = 384
"""Tokens from which on a matrix is decoded first."""
DECODING_WARPS = 8
"""Of a block of scaled_decode.cu."""
FEW = 8
"""Tokens that streams of weights are faster for."""


class _Tile(Struct, frozen=True):
    """Tokens of a tile, and its rank for few, for up to as many, and for more."""

    tokens: int
    ranks: tuple[int, int, int]

    def rank(self, tokens: int) -> int:
        """For so many tokens."""
        return self.ranks[0 if tokens <= FEW else 1 if tokens <= PANEL else 2]


def shared_out(tiles: int, chunks: int, workers: int) -> int:
    """Blocks of a cluster that share out the chunks of each of ``tiles``, at least two each.

    Clusters of more than two find room on four fifths of the processors: those of a GPC are no multiple of them.
    """
    fitting = [n for n in range(1, 9) if 2 * n <= chunks and tiles * n * (4 if n <= 2 else 5) <= 4 * workers]
    return max(fitting, default=1)


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
        splits = shared_out(across * down, -(-width // CHUNK), context.workers)
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


class Decoded(ScaledLinear):
    """Hundreds of tokens: the matrix is decoded into scratch and multiplied there, which rounds it to the activations' type.

    The product begins when the other has ended: it fetches weights before it waits for what its predecessor wrote.
    """

    def __init__(self, residual: bool, format_: Format, element: DType) -> None:
        super().__init__(residual, "scaled_decoded", "scaled_decode", format_, element)
        ending = "" if element is DType.BF16 else f"_{element.value}"
        self.modules = {tiles: f"{module}{ending}" for tiles, module in INSTANCES.items()}
        self.kernels = [(self.module, "scaled_decode"), *((module, "linear_tma") for module in self.modules.values())]

    rank = 97

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
        reasons = super().refusals(need)
        if tokens < MANY:
            reasons.append(f"it is for {MANY} tokens and more, not {tokens}")
        if rows % 4 or width < 2 * PANEL:
            reasons.append(f"it is for multiples of 4 rows, of {2 * PANEL} elements and more, not {rows} of {width}")
        return reasons

    def scratch_bytes(self, need: OpNeed) -> int:
        """The matrix, and sums that clusters hand over."""
        return self._matrix(need) + handed_bytes(self._tiles(need), need)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tiles, shape, size = self._tiles(need), need.operands["weight"].shape, self._matrix(need)
        units, chunks = extents(shape)
        args = [*addresses(context, "weight"), ptr(context.scratch.address), i32(shape[0]), i32(shape[1])]
        geometry = Geometry((-(-units * chunks // DECODING_WARPS), 1, 1), (32 * DECODING_WARPS, 1, 1))
        decoded = {**need.operands, "weight": OperandSpec(shape, self.element, plain(self.element))}
        there = {**context.operands, "weight": Buffer(context.scratch.address, size)}
        product = multiply(
            tiles, self.modules[tiles], replace(need, operands=decoded), replace(context, operands=there),
            context.scratch.address + size, overlap=False,
        )  # fmt: skip
        return *self.launch_of(context, self.module, "scaled_decode", geometry, args), product

    @staticmethod
    def _matrix(need: OpNeed) -> int:
        rows, width = need.operands["weight"].shape
        return -(-2 * rows * width // 1024) * 1024

    @staticmethod
    def _tiles(need: OpNeed) -> Tiles:
        tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
        return min(INSTANCES, key=lambda tiles: tiles.time(tokens, rows, width))


def scaled() -> list[OpImplementation]:
    """All of them."""
    kinds = [(residual, each) for each in FORMATS for residual in (False, True)]
    tiled = [ScaledTma(tile, *kind, element) for element in ELEMENTS for kind in kinds for tile in TILES]
    return [*tiled, *(Decoded(*kind, element) for element in ELEMENTS for kind in kinds)]
