"""Products with weights of 16 bits, with or without a residual: streams of weights for few tokens, tensor-core tiles for many."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, i32, ptr
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    Implementation,
    addresses,
    live_word,
    not_fast,
    not_stored,
    other_type,
    ragged,
    shared_limit,
    unbounded,
)

ROWS = 16
"""Weight rows of a tile of the streaming kernels (gemv.cuh)."""
THREADS = 256


DEPTH = 8
"""Chunks of weights that a warp keeps in flight (GEMV_DEPTH): 128 KiB a processor."""
_DEPTHS = {8: DEPTH, 16: 5, 32: 3}
"""By columns: what shared memory holds beside the columns and their sums."""
SHORT = 3
"""GEMV_DEPTH of instances for small matrices: all of a block's weights, and room for the blocks of several launches on a processor."""
SHORT_WIDTH, SHORT_ROWS = SHORT * 8 * 64, 4096
"""What such a matrix has at most: a tile is SHORT chunks a warp, every tile a block."""
MAX_SPLITS, MIN_STEPS = 8, 4
"""Blocks of a cluster that every device can hold together, and what is left to each of them (gemm.cuh)."""
_STAGES = {64: 4, 128: 3}
"""GEMM_STAGES by the tokens of a tile: 96 KiB of shared memory."""


def streaming_bytes(columns: int, depth: int = DEPTH) -> int:
    """Shared memory of a streaming kernel without its columns: 8 warps' rings of 2 KiB chunks, their sums two tiles deep."""
    return 8 * depth * 2048 + 2 * 8 * ROWS * columns * 4


def too_large(shape: tuple[int, ...]) -> list[str]:
    """Why a matrix is none of the small ones whose rows and summed dimension these are; no reason when it is."""
    rows, width = shape
    if width <= SHORT_WIDTH and rows <= SHORT_ROWS:
        return []
    return [f"it is for matrices of up to {SHORT_ROWS} rows of {SHORT_WIDTH}, not {rows} of {width}"]


class Linear(Implementation):
    """Both ops: ``residual`` tells whether a sum with the residual stream follows."""

    def __init__(self, residual: bool, variant: str, module: str, element: DType) -> None:
        self.residual = residual
        self.op = "linear_add" if residual else "linear"
        self.name = f"{self.op}_{variant}"
        self.module = module
        super().__init__(element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = [
            *not_fast(need, self.element), *other_type(need, self.element, "x"), *ragged(need, "x"), *unbounded(need, "x"),
            *self.unread(need),
        ]  # fmt: skip
        if self.residual:
            reasons += other_type(need, DType.F32, "residual", "y")
        elif need.operands["y"].dtype not in (self.element, DType.F32):
            reasons.append(f"y is {need.operands['y'].dtype.value}, neither {self.element.value} nor f32")
        return reasons

    def unread(self, need: OpNeed) -> list[str]:
        """Why the weight cannot be read as it is stored; no reason when it can."""
        return not_stored(need, "weight", self.element.value)

    def arguments(self, need: OpNeed, context: BindContext, *own: Arg) -> list[Arg]:
        """In the order that both kernels share, with what is a kernel's own before the last."""
        rows, width = need.operands["weight"].shape
        residual = ptr(context.operands["residual"].address) if self.residual else ptr(0)
        return [
            ptr(context.counts), live_word(need.operands["x"]), *addresses(context, "x", "weight"), residual,
            *addresses(context, "y"), i32(rows), i32(width), *own, i32(int(need.operands["y"].dtype is DType.F32)),
        ]  # fmt: skip


class Streamed(Linear):
    """Up to ``columns`` tokens: bound by the speed at which weights arrive. Fewer columns rank higher, and ``short`` for small matrices."""

    entry = "linear_gemv"

    def __init__(self, columns: int, residual: bool, element: DType = DType.BF16, *, short: bool = False) -> None:
        self.columns = columns
        self.short = short
        self.rank = 100 - columns + short
        variant = f"gemv_{columns}{'_short' if short else ''}"
        super().__init__(residual, variant, f"linear_{variant}".removesuffix("_8"), element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = super().refusals(need)
        if self.short:
            reasons += too_large(need.operands["weight"].shape)
        if need.operands["x"].shape[0] > self.columns:
            reasons.append(f"it takes at most {self.columns} tokens, not {need.operands['x'].shape[0]}")
        elif self._shared(need) > shared_limit(need):
            reasons.append(
                f"it needs {self._shared(need)} bytes of shared memory, and {need.arch} has {shared_limit(need)}"
            )
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tiles = -(-need.operands["weight"].shape[0] // ROWS)
        # One block a processor, so that the successor's blocks go to one processor each as well.
        blocks = tiles if self.short else min(tiles, context.workers)
        geometry = Geometry((blocks, 1, 1), (THREADS, 1, 1), self._shared(need))
        return self.launch(context, geometry, self.arguments(need, context, i32(need.operands["x"].shape[0])))

    def _shared(self, need: OpNeed) -> int:
        depth = SHORT if self.short else _DEPTHS[self.columns]
        return streaming_bytes(self.columns, depth) + 8 * depth * 128 * need.operands["x"].shape[0]


class Tiled(Linear):
    """Any number of tokens, ``edge`` of them and 128 weight rows a tile. Tall tiles win once they fill the machine.

    Where tiles are fewer than processors, clusters share out the summed dimension.
    """

    entry = "linear_gemm"
    rows, depth = 128, 64

    def __init__(self, edge: int, residual: bool, element: DType = DType.BF16) -> None:
        self.edge = edge
        super().__init__(residual, f"gemm_{edge}", "linear_gemm" if edge == 64 else f"linear_gemm_{edge}", element)

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The rank depends on the number of tokens."""
        verdict = super().supports(need)
        if not verdict.ok or self.edge == 64:
            return verdict
        return Verdict.yes(20 if need.operands["x"].shape[0] >= 256 else 5)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = super().refusals(need)
        if self._shared() > shared_limit(need):
            reasons.append(
                f"its tiles need {self._shared()} bytes of shared memory, and {need.arch} has {shared_limit(need)}"
            )
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
        across, down = -(-tokens // self.edge), -(-rows // self.rows)
        splits = shared_out(across * down, -(-width // self.depth), context.workers)
        # Tokens vary fastest, so that blocks that run together share weights in the L2 cache.
        geometry = Geometry((across, down, splits), (2 * self.edge, 1, 1), self._shared())
        return self.launch(context, geometry, self.arguments(need, context), cluster=(1, 1, splits))

    def _shared(self) -> int:
        return _STAGES[self.edge] * (self.edge + self.rows) * self.depth * 2


def shared_out(tiles: int, steps: int, workers: int) -> int:
    """How many blocks of a cluster share out the ``steps`` of each of ``tiles``: a power of two.

    As many as give every processor a block, at least MIN_STEPS each. A second block a processor is worth the exchange of sums
    between two, not between more (docs/measured-facts.md).
    """
    splits = 1
    while splits < MAX_SPLITS and steps >= MIN_STEPS * splits * 2:
        room = 2 * workers if splits == 1 else workers
        if tiles * splits * 2 > room:
            break
        splits *= 2
    return splits


ALL: tuple[OpImplementation, ...] = tuple(
    make
    for element in ELEMENTS
    for residual in (False, True)
    for make in (
        *(Streamed(columns, residual, element) for columns in (8, 16, 32)),
        Streamed(8, residual, element, short=True),
        *(Tiled(edge, residual, element) for edge in (64, 128)),
    )
)
