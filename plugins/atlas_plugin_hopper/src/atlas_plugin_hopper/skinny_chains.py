"""Chains of two skinny products with a norm between them: the first does the norm's part, so that it costs no launch of its own."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_nvidia.implementations.attention import kv_layout, other_cache
from atlas_nvidia.implementations.base import no_vector, other_type, ragged
from atlas_plugin_hopper.skinny import GATE_UP_ROWS, LINEAR_ROWS, QKV_ROWS, Skinny, gate_up, linear, qkv, unrotated
from atlas_plugin_hopper.tiles import TOKENS, Normed, Product

FEW = 8
"""Tokens that the streaming kernels of every NVIDIA machine take in as few launches."""


class _Chained(Skinny):
    """A projection into the residual stream, its norm and products behind it: the norm costs no launch of its own.

    The first launch also leaves, in scratch, the new stream times the norm's weights and sums of its squares; the second
    finds the norm's factor in those, and multiplies what it has summed. That wants the range of float32.
    """

    rank = 30
    second: Product

    def __init__(self) -> None:
        super().__init__(DType.BF16)
        self.first = Product("skinny_linear", LINEAR_ROWS, DType.BF16)
        self.kernels = [*self.first.kernels, *self.second.kernels]

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = [
            *super().refusals(need), *other_type(need, self.element, "x"), *other_type(need, DType.F32, "residual", "y"),
            *ragged(need, "y"), *no_vector(need, "norm_weight"),
        ]  # fmt: skip
        if need.operands["x"].shape[0] <= FEW:
            reasons.append(f"up to {FEW} tokens are normalised where they are multiplied")
        return reasons

    def scratch_bytes(self, need: OpNeed) -> int:
        """The scaled tokens, and a sum of squares for each tile and token."""
        width = need.operands["y"].shape[1]
        return self._squares(need) + 4 * TOKENS * -(-width // min(LINEAR_ROWS))

    def _squares(self, need: OpNeed) -> int:
        """Where the sums of squares begin in scratch."""
        tokens, width = need.operands["y"].shape
        return -(-2 * tokens * width // 256) * 256

    def project(self, need: OpNeed, context: BindContext) -> tuple[Launch, Normed]:
        """The first launch, and what it leaves to the second."""
        parts = self.first.tiling(context.workers, need.operands["weight"].shape[0]).tiles
        scratch = context.scratch.address
        norm = Normed(scratch, scratch + self._squares(need), parts)
        return linear(self.first, need, context, norm), norm


class LinearAddGateUp(_Chained):
    """From attention to the middle of the feed-forward network."""

    op, name = "linear_add_norm_gate_up_silu", "linear_add_gate_up_skinny"
    matrices = ("weight", "gate_weight", "up_weight")
    second = Product("skinny_gate_up", GATE_UP_ROWS, DType.BF16, unit=2)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_type(need, self.element, "z")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        first, normed = self.project(need, context)
        return first, gate_up(self.second, need, context, normed, "z")


class LinearAddQkv(_Chained):
    """From the end of one layer to the attention of the next."""

    op, name = "linear_add_norm_qkv_rope_append", "linear_add_qkv_skinny"
    matrices = ("weight", "q_weight", "k_weight", "v_weight")
    second = Product("skinny_qkv", QKV_ROWS, DType.BF16)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *super().refusals(need), *other_type(need, self.element, "q"), *other_cache(need, self.element), *unrotated(need),
        ]  # fmt: skip

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        first, normed = self.project(need, context)
        return first, qkv(self.second, need, context, normed)


def skinny_chains() -> list[OpImplementation]:
    """All of them, in bfloat16."""
    return [LinearAddGateUp(), LinearAddQkv()]
