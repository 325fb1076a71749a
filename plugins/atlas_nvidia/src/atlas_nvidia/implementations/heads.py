"""Norms of single heads and products with gates; and what of a layer lies between its projections and its attention."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpImplementation, OpNeed
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
    """Norms and rotation of queries and keys, and the write of keys and values, a block a token."""

    op, name = "heads_rope_append", "heads_rope_append"
    module, entry = "head_norm", "heads_rope_append"
    rank = 50

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        half, dim = need.operands["inv_freq"].shape[0], need.attrs["head_dim"]
        reasons = [
            *not_fast(need, self.element), *other_type(need, self.element, "q_plain", "k_plain", "v", "q"),
            *no_vector(need, "q_norm"), *no_vector(need, "k_norm"), *unheld(dim), *other_cache(need, self.element),
            *ragged(need, "q_plain"),
        ]  # fmt: skip
        if half & (half - 1) or not VECTOR <= half <= MOST_PAIRS:
            reasons.append(f"{half} pairs rotate, which is no power of two from {VECTOR} to {MOST_PAIRS}")
        return reasons

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
        return self.launch(context, Geometry((need.tokens, 1, 1), (256, 1, 1)), args)


ALL: tuple[OpImplementation, ...] = tuple(
    make(element) for element in ELEMENTS for make in (SigmoidMul, HeadRmsNorm, HeadsRopeAppend)
)
