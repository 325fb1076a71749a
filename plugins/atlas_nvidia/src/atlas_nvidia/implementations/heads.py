"""Norms of single heads and products with gates; and what of a layer lies between its projections and its attention."""

from collections.abc import Sequence

from msgspec.structs import replace

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, Buffer, KVLayout, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, f32, i32, ptr
from atlas_nvidia.implementations.attention import kv_layout, layer_address, other_cache
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    VECTOR,
    WARP,
    Implementation,
    addresses,
    live_word,
    no_vector,
    not_fast,
    other_type,
    ragged,
    spread,
    unbounded,
    vector_type,
)
from atlas_nvidia.implementations.fused import NormQkvHeadsRopeAppend, NormQkvRopeAppend, norm_bytes
from atlas_nvidia.implementations.linear import ROWS, THREADS
from atlas_nvidia.implementations.rows import Elementwise

MOST_PAIRS = 128
"""Pairs of dimensions of a head that heads_rope_append turns."""


class SigmoidMul(Elementwise):
    """A gate for each feature, or one for the row."""

    op, name, entry, first, second = "sigmoid_mul", "sigmoid_mul", "sigmoid_mul", "x", "gate"

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, width = need.operands["y"].shape
        args = [
            ptr(context.counts), live_word(need.operands["y"]), *addresses(context, "x", "gate", "y"), i32(width),
            i32(need.operands["gate"].shape[1]),
        ]  # fmt: skip
        return self.launch(context, spread(rows * width // VECTOR), args)


def head_lanes(head_dim: int) -> int:
    """Lanes that hold a head, VECTOR dimensions each: a power of two."""
    return 1 << (-(-head_dim // VECTOR) - 1).bit_length()


def unheld(head_dim: int) -> list[str]:
    """Refusals of heads that are no whole number of vectors, or more than a warp holds."""
    if head_dim % VECTOR or head_dim > WARP * VECTOR:
        return [f"heads have {head_dim} dimensions, which is no multiple of {VECTOR} up to {WARP * VECTOR}"]
    return []


def unturned(need: OpNeed) -> list[str]:
    """Refusals of rotations that no group of lanes makes among itself."""
    half = need.operands["inv_freq"].shape[0]
    if half & (half - 1) or not VECTOR <= half <= MOST_PAIRS:
        return [f"{half} pairs rotate, which is no power of two from {VECTOR} to {MOST_PAIRS}"]
    return []


class HeadRmsNorm(Implementation):
    """A group of lanes a head."""

    op, name = "head_rms_norm", "head_rms_norm"
    module, entry = "head_norm", "head_rms_norm"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, self.element, "x", "y"), *no_vector(need, "weight"),
            *unheld(need.operands["weight"].shape[0]), *unbounded(need, "y"),
        ]  # fmt: skip

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, width = need.operands["y"].shape
        dim = need.operands["weight"].shape[0]
        lanes = head_lanes(dim)
        args = [
            ptr(context.counts), live_word(need.operands["y"]), *addresses(context, "x", "weight", "y"), i32(width // dim),
            i32(dim), i32(lanes), f32(need.attrs["eps"]), vector_type(need, "weight"),
        ]  # fmt: skip
        return self.launch(context, spread(rows * width // dim * lanes), args)


class HeadsRopeAppend(Implementation):
    """Norms and rotation of queries and keys, and the write of keys and values, a group of lanes a head."""

    op, name = "heads_rope_append", "heads_rope_append"
    module, entry = "head_norm", "heads_rope_append"
    rank = 50

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, self.element, "q_plain", "k_plain", "v", "q"),
            *no_vector(need, "q_norm"), *no_vector(need, "k_norm"), *unheld(need.attrs["head_dim"]),
            *other_cache(need, self.element), *ragged(need, "q_plain"), *unturned(need),
        ]  # fmt: skip

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs, dim = need.attrs, need.attrs["head_dim"]
        lanes = head_lanes(dim)
        names = (
            "q_plain", "k_plain", "v", "q_norm", "k_norm", "positions", "inv_freq", "token_row", "row_slot", "slots",
        )  # fmt: skip
        args = [
            ptr(context.counts), *addresses(context, *names), layer_address(need, context), *addresses(context, "q"),
            *(i32(v) for v in (attrs["q_heads"], attrs["kv_heads"], dim, need.operands["inv_freq"].shape[0], lanes)),
            i32(attrs["page_tokens"]), i32(attrs["slot_stride"]), i32(attrs["table_offset"]), f32(attrs["head_eps"]),
            f32(attrs["rope_scale"]), vector_type(need, "q_norm"), vector_type(need, "k_norm"),
        ]  # fmt: skip
        groups = -(-(attrs["q_heads"] + 2 * attrs["kv_heads"]) * lanes // THREADS)
        return self.launch(context, Geometry((need.tokens, groups, 1), (THREADS, 1, 1)), args)


class NormThenHeads(NormQkvHeadsRopeAppend):
    """norm_qkv_heads_rope_append in two launches: projections into scratch, then a block a token.

    The exchange of sums between the blocks of a cluster, and the wait of a cluster for processors, cost more than a launch.
    """

    name = "norm_then_heads"
    module, entry = "norm_linears", "norm_linears"
    rank = 55

    def __init__(self, element: DType = DType.BF16) -> None:
        super().__init__(element)
        self.heads = HeadsRopeAppend(element)
        self.kernels = ((self.module, self.entry), *self.heads.kernels)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*NormQkvRopeAppend.refusals(self, need), *unturned(need), *unheld(need.attrs["head_dim"])]

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory of the projections."""
        tokens, width = need.operands["x"].shape
        return norm_bytes(width, tokens)

    def _features(self, need: OpNeed) -> tuple[int, int]:
        """Of all queries, and of all keys."""
        dim = need.attrs["head_dim"]
        return need.attrs["q_heads"] * dim, need.attrs["kv_heads"] * dim

    def scratch_bytes(self, need: OpNeed) -> int:
        """Queries, keys and values as projected."""
        q, kv = self._features(need)
        return need.tokens * (q + 2 * kv) * 2

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, width = need.operands["x"].shape
        q, kv = self._features(need)
        starts = (0, tokens * q * 2, tokens * (q + kv) * 2)
        plain = {
            name: Buffer(context.scratch.address + start, tokens * size * 2)
            for name, start, size in zip(("q_plain", "k_plain", "v"), starts, (q, kv, kv), strict=True)
        }
        matrices = [*addresses(context, *self.matrices), ptr(0)]
        outputs = [*(ptr(buffer.address) for buffer in plain.values()), ptr(0)]
        args = [
            ptr(context.counts), *addresses(context, "x", "norm_weight"), *matrices, *outputs,
            *(i32(rows) for rows in (q, kv, kv, 0)), i32(width), i32(tokens), f32(need.attrs["eps"]),
            vector_type(need, "norm_weight"),
        ]  # fmt: skip
        blocks = min((q + 2 * kv) // ROWS, context.workers)
        return (
            *self.launch(context, Geometry((blocks, 1, 1), (THREADS, 1, 1), self.shared(need)), args),
            *self.heads.bind(need, replace(context, operands={**context.operands, **plain})),
        )


ALL: tuple[OpImplementation, ...] = tuple(
    make(element) for element in ELEMENTS for make in (SigmoidMul, HeadRmsNorm, HeadsRopeAppend, NormThenHeads)
)
