"""Products with FP8 and NVFP4 weights, which are read as they are stored: numbers become the element type in registers."""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed, Packed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, i32
from atlas_core.vocab.layout import StorageLayout
from atlas_nvidia import packing
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    Implementation,
    not_stored,
    shared_limit,
)
from atlas_nvidia.implementations.linear import Linear, shared_out
from atlas_nvidia.packing import CHUNK, CHUNK_BYTES, E4M3_UNITS, NVFP4_UNITS, PACKINGS, UNIT

COLUMNS, ROWS, THREADS, WARPS = 8, 16, 256, 8
"""Tokens of the streaming kernels, weight rows of a tile, threads and warps of a block (scaled_gemv.cuh)."""
TILE, TOKENS, STAGES, TILE_THREADS = 128, 64, 3, 128
"""Weight rows and tokens of a tile of scaled_gemm, stages, and threads of a block."""


class Format(Struct, frozen=True):
    """What the modules of one packing are called, and SCALED_DEPTH of its streaming kernels."""

    packing: str
    suffix: str
    depth: int

    @property
    def layouts(self) -> list[str]:
        """Storage layouts that are packed so."""
        return [layout for layout, name in PACKINGS.items() if name == self.packing]

    @property
    def ring(self) -> int:
        """Bytes of a streaming kernel's shared memory without its columns."""
        slot = 2 * CHUNK_BYTES[self.packing] + 16
        return WARPS * self.depth * slot + 2 * WARPS * ROWS * COLUMNS * 4


FORMATS = (Format(E4M3_UNITS, "", 3), Format(NVFP4_UNITS, "_nvfp4", 4))


class Place(Struct, frozen=True):
    """Blocks of a processor, the shared memory of each, and which of the ways of using it this is."""

    blocks: int
    shared: int
    way: int = 0

    @classmethod
    def of(cls, need: OpNeed, *ways: int) -> "Place":
        """The first of these ways, by their bytes, with room for two blocks, else the first with room for one.

        One warp's instructions wait for one another, so that eight are too few. A lone block takes more than half of the memory: those
        that come early, of the next launch, do not pile up where there is room first.
        """
        half = (shared_limit(need) - 1024) // 2
        for way, nbytes in enumerate(ways):
            if nbytes <= half:
                return cls(2, nbytes, way)
        fitting = [way for way, nbytes in enumerate(ways) if nbytes <= shared_limit(need)]
        way = fitting[0] if fitting else len(ways) - 1
        return cls(1, max(ways[way], half + 1024), way)


class Scaled(Implementation):
    """``matrices`` are the weights, all of one packing."""

    matrices: tuple[str, ...] = ("weight",)
    format: Format

    def unread(self, need: OpNeed) -> list[str]:
        """Why they cannot be read as they are stored."""
        return [reason for name in self.matrices for reason in not_stored(need, name, *self.format.layouts)]

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """See OpImplementation."""
        found = {}
        for name in self.matrices:
            spec = need.operands[name]
            if spec.layout is not None and spec.layout.name in self.format.layouts:
                found[name] = packing.packed(spec.layout, spec.shape)
        return found

    def pack(
        self, packing_: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview
    ) -> bytes | np.ndarray:
        """See OpImplementation."""
        return packing.pack(packing_, layout, shape, data)


class ScaledLinear(Scaled, Linear):
    """Both ops, as Linear."""

    def __init__(self, residual: bool, variant: str, module: str, format_: Format, element: DType) -> None:
        self.format = format_
        Linear.__init__(self, residual, f"{variant}{format_.suffix}", f"{module}{format_.suffix}", element)


class Streamed(ScaledLinear):
    """Up to 8 tokens: bound by the speed at which weights arrive."""

    entry, rank = "scaled_linear", 90

    def __init__(self, residual: bool, format_: Format, element: DType) -> None:
        super().__init__(residual, "scaled", "scaled_linear", format_, element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons, tokens = super().refusals(need), need.operands["x"].shape[0]
        if tokens > COLUMNS:
            reasons.append(f"it takes at most {COLUMNS} tokens, not {tokens}")
        elif (nbytes := self._place(need).shared) > shared_limit(need):
            reasons.append(f"it needs {nbytes} bytes of shared memory, and {need.arch} has {shared_limit(need)}")
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tiles, place = -(-need.operands["weight"].shape[0] // ROWS), self._place(need)
        geometry = Geometry((min(tiles, place.blocks * context.workers), 1, 1), (THREADS, 1, 1), place.shared)
        own = i32(need.operands["x"].shape[0]), i32(int(place.way == 0))
        return self.launch(context, geometry, self.arguments(need, context, *own))

    def _place(self, need: OpNeed) -> Place:
        """With all tokens in shared memory, or with those that come with the chunks."""
        tokens, width = need.operands["x"].shape
        resident = tokens * (-(-width // CHUNK) * 2 * CHUNK + 16)
        return Place.of(
            need, self.format.ring + resident, self.format.ring + WARPS * self.format.depth * 2 * CHUNK * tokens
        )


class Tiled(ScaledLinear):
    """Any number of tokens, 64 of them and 128 weight rows a tile; clusters share out the summed dimension of few tiles."""

    entry = "scaled_gemm"

    def __init__(self, residual: bool, format_: Format, element: DType) -> None:
        super().__init__(residual, "scaled_gemm", "scaled_gemm", format_, element)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
        across, down = -(-tokens // TOKENS), -(-rows // TILE)
        splits = shared_out(across * down, -(-width // 64), context.workers)
        stage = TOKENS * 2 * CHUNK + TILE // UNIT * (CHUNK_BYTES[self.format.packing] + 4)
        # Tokens vary fastest, so that blocks that run together share weights in the L2 cache.
        geometry = Geometry((across, down, splits), (TILE_THREADS, 1, 1), STAGES * stage)
        return self.launch(context, geometry, self.arguments(need, context), cluster=(1, 1, splits))


def streamed(formats: Sequence[Format]) -> list[OpImplementation]:
    """For few tokens, with rings as deep as ``formats`` have them."""
    return [Streamed(residual, each, element) for element in ELEMENTS for each in formats for residual in (False, True)]


ALL: tuple[OpImplementation, ...] = (
    *streamed(FORMATS),
    *(Tiled(residual, each, element) for element in ELEMENTS for each in FORMATS for residual in (False, True)),
)
