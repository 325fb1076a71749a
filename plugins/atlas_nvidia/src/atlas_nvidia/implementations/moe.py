"""Products of each token with its experts.

Few tokens stream the weights of their experts, two launches; many are sorted by expert and multiplied in tiles, four launches.
"""

from collections.abc import Mapping, Sequence

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
    spread,
    unbounded,
)
from atlas_nvidia.implementations.route import MAX_EXPERTS

THREADS, WARPS, ROWS = 256, 8, 16
"""Of the streaming kernels: of a block, and weight rows of a tile."""
FEW = 64
"""Tokens that stream weights at most: their sums lie in shared memory."""
MOST_STREAMED = 2**14
"""Choices that the streaming kernels count in 16 bits, with room to spare."""
CHUNK_BYTES = 2048
TILE_BYTES = 16
"""Of a MoeTile (moe_tiles.cuh)."""
_ALIGNMENT = 256
_STAGES = {64: 4, 128: 3}
"""GEMM_STAGES by the tokens of a tile."""
_TILE_ROWS, _GEMM_DEPTH = 128, 64
STREAMED = ("moe_experts", "moe_experts_add", "moe_shared_add")
SORTED = ("moe_experts", "moe_experts_add")
"""Ops that few tokens stream, and that many are sorted for."""
_MATRICES = ("gate", "up", "down")
_SHARED = ("shared_gate_weight", "shared_up_weight", "shared_down_weight", "shared_weight")


class _Experts(Implementation):
    """All three ops. ``added`` tells whether a sum with the residual stream follows, ``shared`` whether there is an expert for all."""

    def __init__(self, op: str, variant: str, element: DType, layouts: Sequence[str] = ()) -> None:
        """``layouts``: how it reads matrices, where that is not as a plain array of ``element``."""
        self.op, self.layouts = op, layouts or (element.value,)
        self.added, self.shared = op != "moe_experts", op == "moe_shared_add"
        self.name = f"{op}_{variant}"
        super().__init__(element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        experts, size, hidden = need.operands["gate"].shape
        matrices = (*_MATRICES, *_SHARED) if self.shared else _MATRICES
        reasons = [
            *not_fast(need, self.element), *other_type(need, self.element, "x"), *ragged(need, "x"), *unbounded(need, "x"),
            *(reason for name in matrices for reason in not_stored(need, name, *self.layouts)),
        ]  # fmt: skip
        if self.added:
            reasons += other_type(need, DType.F32, "residual", "y")
        elif need.operands["y"].dtype not in (self.element, DType.F32):
            reasons.append(f"y is {need.operands['y'].dtype.value}, neither {self.element.value} nor f32")
        if experts > MAX_EXPERTS or size % 8 or hidden % ROWS:
            reasons.append(
                f"{experts} experts of {size} for {hidden}: it takes {MAX_EXPERTS}, multiples of 8 and of {ROWS}"
            )
        if self.shared and need.operands["shared_gate_weight"].shape[0] != size:
            reasons.append(
                f"the shared expert has {need.operands['shared_gate_weight'].shape[0]}, the others have {size}"
            )
        return reasons

    def choices(self, need: OpNeed) -> int:
        """Products of a token with an expert, of all tokens."""
        tokens, top_k = need.operands["experts"].shape
        return tokens * (top_k + int(self.shared))

    def of_residual(self, context: BindContext) -> Arg:
        """The residual stream, or nothing."""
        return ptr(context.operands["residual"].address) if self.added else ptr(0)


class Streamed(_Experts):
    """Two launches for up to FEW tokens; ``unit`` tokens of an expert share one reading of its weights (moe.cuh)."""

    depths: Mapping[int, tuple[int, int]] = {8: (8, 8), 16: (6, 5)}
    """MOE_DEPTH of gate_up and of down, by unit: chunks of weights that a warp keeps in flight."""

    def __init__(self, unit: int, op: str, element: DType) -> None:
        self.unit = unit
        suffix = ("" if unit == 8 else f"_{unit}") + ("" if element is DType.BF16 else f"_{element.value}")
        super().__init__(op, f"streamed_{unit}", element)
        self.kernels = tuple((f"{part}{suffix}", part) for part in ("moe_gate_up", "moe_down"))

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The smallest unit that holds all tokens ranks highest; larger ones read weights once more often."""
        reasons = self.refusals(need)
        tokens = need.operands["x"].shape[0]
        return Verdict.no(*reasons) if reasons else Verdict.yes(60 if (self.unit == 8) == (tokens <= 8) else 55)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons, tokens = super().refusals(need), need.operands["x"].shape[0]
        if tokens > FEW or self.choices(need) > MOST_STREAMED:
            reasons.append(f"it takes at most {FEW} tokens, not {tokens}")
        elif max(self.shared_bytes(need)) > shared_limit(need):
            reasons.append(
                f"it needs {max(self.shared_bytes(need))} bytes of shared memory, and {need.arch} has {shared_limit(need)}"
            )
        return reasons

    def shared_bytes(self, need: OpNeed) -> tuple[int, int]:
        """Of gate_up and of down: a ring, columns, sums, and the units of moe.cuh."""
        experts, _, hidden = need.operands["gate"].shape
        tokens, choices = need.operands["x"].shape[0], self.choices(need)
        units = -(-(experts + 1 + choices) // 4) * 16 + -(-choices * 10 // 16) * 16
        columns = min(self.unit, tokens)
        first, second = self.depths[self.unit]
        stride = -(-hidden // 64) * 64 + 32
        gate_up = WARPS * first * CHUNK_BYTES + 2 * WARPS * ROWS * self.unit * 4 + columns * stride * 2 + units
        down = WARPS * second * (CHUNK_BYTES + columns * 128) + WARPS * tokens * ROWS * 4 + units
        return gate_up, down

    def scratch_bytes(self, need: OpNeed) -> int:
        """What gate_up leaves for down."""
        return self.choices(need) * need.operands["gate"].shape[1] * 2

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        (gate_up, first), (down, second) = self.kernels
        experts, size, hidden = need.operands["gate"].shape
        tokens, top_k = need.operands["experts"].shape
        live = ptr(context.counts), live_word(need.operands["x"])
        inner = ptr(context.scratch.address)
        own = addresses(context, *_SHARED) if self.shared else [ptr(0)] * len(_SHARED)
        sizes = [i32(hidden), i32(size), i32(experts), i32(top_k), i32(tokens)]
        bytes_first, bytes_second = self.shared_bytes(need)
        tiles = hidden // ROWS
        cluster = shared_blocks(tiles, context.workers, min(experts, self.choices(need)))
        return (
            *self.launch_of(
                context, gate_up, first, Geometry((context.workers, 1, 1), (THREADS, 1, 1), bytes_first),
                [*live, *addresses(context, "x", "experts", "weights", "gate", "up"), own[0], own[1], own[3], inner, *sizes],
            ),
            *self.launch_of(
                context, down, second, Geometry((cluster, tiles, 1), (THREADS, 1, 1), bytes_second),
                [
                    *live, inner, *addresses(context, "experts", "down"), own[2], self.of_residual(context),
                    *addresses(context, "y"), *sizes, i32(min(self.unit, tokens)),
                    i32(int(need.operands["y"].dtype is DType.F32)),
                ],
                cluster=(cluster, 1, 1),
            ),
        )  # fmt: skip


def shared_blocks(tiles: int, workers: int, units: int) -> int:
    """Blocks of a cluster that share out the units of each of ``tiles``: 1, 2, 4 or 8.

    The fewest of those with which processors idle least, each block with a unit for every warp.
    """

    def idle(blocks: int) -> float:
        rounds = -(-tiles * blocks // workers)
        return rounds * workers / (tiles * blocks)

    allowed = [blocks for blocks in (1, 2, 4, 8) if blocks == 1 or blocks * WARPS <= units]
    return min(allowed, key=lambda blocks: (round(idle(blocks), 2), blocks))


class Sorted(_Experts):
    """Four launches for any number of tokens, ``edge`` choices of one expert a tile. Tall tiles win where an expert has many."""

    def __init__(self, edge: int, op: str, element: DType) -> None:
        self.edge = edge
        super().__init__(op, self.variant(), element)
        suffix = "" if element is DType.BF16 else f"_{element.value}"
        self.sort, self.gemm = f"moe_sort{suffix}", f"{self.gemm_module()}{suffix}"
        self.kernels = (
            (self.sort, "moe_sort"), *((self.gemm, entry) for entry in self.gemm_entries), (self.sort, "moe_combine"),
        )  # fmt: skip

    gemm_entries = ("moe_gemm_gate_up", "moe_gemm_down")

    def variant(self) -> str:
        """What tells it from others of its op."""
        return f"sorted_{self.edge}"

    def gemm_module(self) -> str:
        """Where the products are, in bf16."""
        return "moe_gemm" if self.edge == 64 else f"moe_gemm_{self.edge}"

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The rank depends on the number of choices an expert."""
        reasons = self.refusals(need)
        each = self.choices(need) / need.operands["gate"].shape[0]
        return Verdict.no(*reasons) if reasons else Verdict.yes(20 if (self.edge == 128) == (each >= 192) else 10)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = super().refusals(need)
        if self.gemm_shared() > shared_limit(need):
            reasons.append(
                f"its tiles need {self.gemm_shared()} bytes of shared memory, and {need.arch} has {shared_limit(need)}"
            )
        if self.choices(need) * max(need.operands["gate"].shape[1:]) >= 2**32:
            reasons.append("offsets of its rows do not fit 32 bits")
        return reasons

    def gemm_shared(self) -> int:
        """Bytes of shared memory of the products."""
        return _STAGES[self.edge] * (self.edge + _TILE_ROWS) * _GEMM_DEPTH * 2

    def most(self, need: OpNeed) -> int:
        """Tiles at most: each expert may end within one."""
        choices = self.choices(need)
        return min(choices, choices // self.edge + need.operands["gate"].shape[0])

    def _sections(self, need: OpNeed) -> list[int]:
        """Where order, tiles, what lies between the products, and their results begin in scratch; and the end."""
        choices, (_, size, hidden) = self.choices(need), need.operands["gate"].shape
        starts = [0]
        for nbytes in (4 * choices, TILE_BYTES * self.most(need), 2 * choices * size, 2 * choices * hidden):
            starts.append(starts[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        return starts

    def scratch_bytes(self, need: OpNeed) -> int:
        """See ``_sections``."""
        return self._sections(need)[-1]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        experts, _, hidden = need.operands["gate"].shape
        tokens, top_k = need.operands["experts"].shape
        order, tiles, inner, outer = (ptr(context.scratch.address + start) for start in self._sections(need)[:-1])
        live = ptr(context.counts), live_word(need.operands["x"])
        return (
            *self.launch_of(
                context, self.sort, "moe_sort", Geometry((1, 1, 1), (1024, 1, 1)),
                [
                    *live, *addresses(context, "experts"), order, tiles, i32(experts), i32(top_k), i32(self.edge),
                    i32(self.most(need)),
                ],
            ),
            *self.products(need, context, order, tiles, inner, outer),
            *self.launch_of(
                context, self.sort, "moe_combine", spread(tokens * hidden // 8),
                [
                    *live, outer, self.of_residual(context), *addresses(context, "y"), i32(hidden), i32(top_k),
                    i32(int(need.operands["y"].dtype is DType.F32)),
                ],
            ),
        )  # fmt: skip

    def products(
        self, need: OpNeed, context: BindContext, order: Arg, tiles: Arg, inner: Arg, outer: Arg
    ) -> Sequence[Launch]:
        """gate and up, then down, over what moe_sort has made."""
        _, size, hidden = need.operands["gate"].shape
        most, block, shared = self.most(need), (2 * self.edge, 1, 1), self.gemm_shared()
        gate_up, down = self.gemm_entries
        return (
            *self.launch_of(
                context, self.gemm, gate_up, Geometry((-(-size // (_TILE_ROWS // 2)), most, 1), block, shared),
                [tiles, order, *addresses(context, "x", "weights", "gate", "up"), inner, *self.gate_up_sizes(need)],
            ),
            *self.launch_of(
                context, self.gemm, down, Geometry((-(-hidden // _TILE_ROWS), most, 1), block, shared),
                [tiles, order, inner, *addresses(context, "down"), outer, *self.down_sizes(need)],
            ),
        )  # fmt: skip

    def gate_up_sizes(self, need: OpNeed) -> Sequence[Arg]:
        """The last arguments of the first product."""
        return *Sorted.down_sizes(self, need), i32(need.operands["experts"].shape[1])

    def down_sizes(self, need: OpNeed) -> Sequence[Arg]:
        """And of the second."""
        _, size, hidden = need.operands["gate"].shape
        return i32(hidden), i32(size)


def _of(element: DType) -> list[OpImplementation]:
    return [
        *(Streamed(unit, op, element) for op in STREAMED for unit in (8, 16)),
        *(Sorted(edge, op, element) for op in SORTED for edge in (64, 128)),
    ]


ALL: tuple[OpImplementation, ...] = tuple(made for element in ELEMENTS for made in _of(element))
