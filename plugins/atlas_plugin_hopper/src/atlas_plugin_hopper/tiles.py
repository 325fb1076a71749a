"""How the kernels of skinny.cuh are spread over the machine: weight rows of a tile, blocks that share its sum, stages of the ring."""

from collections.abc import Sequence

from msgspec import Struct

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs

TOKENS, DEPTH = 64, 64
"""Tokens of a tile, and summed elements of a stage."""
THREADS = 192
SHARED = 226 * 1024
"""Dynamic shared memory of a block: what sm_90 has (CUDA programming guide, compute capabilities) but for the static part."""
_MAX_STAGES = 14
_X_ROWS = 32
"""What the tokens of a tile cost a block, in weight rows: they come from the L2 cache."""


class Normed(Struct, frozen=True):
    """Tokens on their way through a norm: a matrix in the element type at ``address``.

    Of tokens that still want the factor of their norm, ``parts`` sums of squares each lie at ``squares``; 0 where it is done.
    """

    address: int
    squares: int = 0
    parts: int = 0


class Tiling(Struct, frozen=True):
    """``tiles`` of ``rows`` weight rows, the sum of each shared out among ``splits`` blocks of a cluster."""

    rows: int
    tiles: int
    splits: int

    @property
    def stage(self) -> int:
        """Bytes of one stage: tokens and weights."""
        return (TOKENS + self.rows) * 2 * DEPTH

    @property
    def sums(self) -> int:
        """Bytes of the sums of one tile."""
        return TOKENS * (self.rows + 8) * 4

    def stages(self, room: int, width: int) -> int:
        """As many as fit into ``room`` bytes, and not more than there are steps."""
        steps = (width + DEPTH - 1) // DEPTH
        return min(_MAX_STAGES, room // self.stage, (steps + self.splits - 1) // self.splits)


def tiling(rows: Sequence[int], options: Sequence[int], workers: int, unit: int = 1) -> Tiling:
    """The tiling by which the busiest processor gets the least; a tile has ``option // unit`` rows of one matrix of ``rows``.

    Clusters of two always find room, larger ones not: a GPC's processors are no multiple of four (docs/measured-facts.md).
    """
    found = []
    for option in options:
        tiles = sum(-(-each * unit // option) for each in rows)
        found.append((-(-tiles // workers) * (option + _X_ROWS), Tiling(option, tiles, 1)))
        if 2 * tiles <= workers:
            found.append(((option + _X_ROWS) // 2, Tiling(option, tiles, 2)))
    return min(found, key=lambda each: each[0])[1]


class Product(Struct, frozen=True):
    """The instances of one kernel, by SKINNY_ROWS; ``unit`` tells how many matrices share a tile's rows."""

    entry: str
    options: tuple[int, ...]
    element: DType
    unit: int = 1

    @property
    def kernels(self) -> list[tuple[str, str]]:
        """(module, entry) of every instance."""
        return [(self._module(rows), self.entry) for rows in self.options]

    def _module(self, rows: int) -> str:
        stem = f"{self.entry}_{rows}"
        return stem if self.element is DType.BF16 else f"{stem}_{self.element.value}"

    def tiling(self, workers: int, *rows: int) -> Tiling:
        """The best of its options for matrices of so many rows."""
        return tiling(rows, self.options, workers, self.unit)

    def plan(
        self, tiles: Tiling, width: int, workers: int, *, own: int = 0, single: bool = False
    ) -> tuple[Geometry, int]:
        """Geometry and stages. ``own`` bytes lie behind the sums; ``single`` forbids a block more than one tile.

        Sums lie behind the ring unless nothing can overlap.
        """
        blocks = tiles.tiles if single or tiles.splits > 1 else min(tiles.tiles, workers)
        apart = own > 0 or tiles.splits > 1 or blocks < tiles.tiles
        behind = tiles.sums + own if apart else 0
        stages = tiles.stages(SHARED - behind, width)
        shared = max(stages * tiles.stage + behind, tiles.sums)
        return Geometry((blocks, tiles.splits, 1), (THREADS, 1, 1), shared), stages

    def launch(self, context: BindContext, tiles: Tiling, geometry: Geometry, args: Sequence[Arg]) -> Launch:
        """It may begin before its predecessor ends: it waits by itself."""
        kernel = context.backend.kernel(self._module(tiles.rows), self.entry)
        attrs = LaunchAttrs(overlap=True, cluster=(1, tiles.splits, 1))
        return context.backend.prepare_launch(kernel, geometry, args, attrs)
