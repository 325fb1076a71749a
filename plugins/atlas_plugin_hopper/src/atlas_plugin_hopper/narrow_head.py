"""Logits of models with a narrow residual stream: the last norm and the head in one launch."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, f32, i32, ptr
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    WARP,
    Implementation,
    addresses,
    live_word,
    no_vector,
    not_fast,
    not_stored,
    other_type,
    shared_limit,
    unbounded,
    vector_type,
)

WARPS, TILE_ROWS, CHUNK, MAX_TOKENS, MAX_STAGES, MAX_WIDTH = 6, 16, 64, 8, 4, 1024
"""Warps of a block, rows of a tile, what the width is a multiple of, and the most of tokens, tiles of a warp and width (narrow_head.cu)."""
PAD = 64
"""Bytes behind a token in shared memory (narrow_head.cu)."""
STATIC = 1024
"""Bytes that are left to static shared memory and to the driver."""


class NarrowHead(Implementation):
    """A warp has whole rows to itself."""

    op, name = "gather_norm_linear", "narrow_head"
    module = entry = "narrow_head"
    rank = 60

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        tokens, _ = need.operands["y"].shape
        rows, width = need.operands["weight"].shape
        reasons = [
            *not_fast(need, self.element), *other_type(need, DType.F32, "x", "y"), *no_vector(need, "norm_weight"),
            *not_stored(need, "weight", self.element.value), *unbounded(need, "y"),
        ]  # fmt: skip
        if need.activation not in (None, self.element):
            reasons.append(f"it computes in {self.element.value}, not in {need.activation.value}")
        if tokens > MAX_TOKENS:
            reasons.append(f"it takes at most {MAX_TOKENS} rows of logits, not {tokens}")
        if rows % TILE_ROWS:
            reasons.append(f"weight has {rows} rows, which is no multiple of {TILE_ROWS}")
        if width % CHUNK or width > MAX_WIDTH:
            reasons.append(f"it is for widths of up to {MAX_WIDTH} in steps of {CHUNK}, not {width}")
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, width = need.operands["weight"].shape
        tokens = need.operands["y"].shape[0] * (2 * width + PAD)
        tile = TILE_ROWS * 2 * width
        stages = min(MAX_STAGES, (shared_limit(need) - STATIC - tokens) // (WARPS * tile))
        args = [
            ptr(context.counts), live_word(need.operands["y"]),
            *addresses(context, "x", "logits_rows", "norm_weight", "weight", "y"), i32(rows), i32(width), i32(stages),
            f32(need.attrs["eps"]), vector_type(need, "norm_weight"),
        ]  # fmt: skip
        blocks = min(context.workers, -(-rows // TILE_ROWS // WARPS))
        return self.launch(
            context, Geometry((blocks, 1, 1), (WARPS * WARP, 1, 1), WARPS * stages * tile + tokens), args
        )


def heads() -> list[NarrowHead]:
    """All of them."""
    return [NarrowHead(element) for element in ELEMENTS]
