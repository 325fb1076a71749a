"""A projection into the residual stream with what follows its norm, for prompts: the norm costs no launch of its own."""

from collections.abc import Mapping, Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.attention import kv_layout, other_cache
from atlas_nvidia.implementations.base import (
    VECTOR,
    Implementation,
    not_fast,
    not_stored,
    other_type,
    ragged,
    unbounded,
)
from atlas_plugin_hopper.prompt_layers import GATE_UP, UNNORMED, entry_of, gate_up, qkv, unrotated
from atlas_plugin_hopper.prompts import DEPTH, INSTANCES, Tiles, handed_bytes, multiply, squares_of
from atlas_plugin_hopper.tiles import Normed


class _Chained(Implementation):
    """The first launch, with ``tiles``, also leaves, in scratch, the new stream times the norm's weights and sums of its squares.

    The second finds the norm's factor in those and multiplies what it has summed. That wants the range of float32, which bfloat16
    has. ``matrices`` are the weights of the second, whose tiles are the best of ``instances``.
    """

    matrices: tuple[str, ...]
    instances: Mapping[Tiles, str]

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles
        self.name = f"{self.name}{INSTANCES[tiles].removeprefix('linear')}"
        super().__init__(DType.BF16)
        self.kernels = (
            (INSTANCES[tiles], "linear_tma"),
            *((module, entry_of(module)) for module in self.instances.values()),
        )

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. It ranks higher where its tiles take the least time of all."""
        verdict = super().supports(need)
        if not verdict.ok:
            return verdict
        tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
        order = sorted(INSTANCES, key=lambda tiles: tiles.time(tokens, rows, width)).index(self.tiles)
        return Verdict.yes(20 - order)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        rows = {name: need.operands[name].shape[0] for name in self.matrices}
        reasons = [
            *not_fast(need, self.element), *other_type(need, self.element, "x"), *other_type(need, DType.F32, "residual", "y"),
            *ragged(need, "x", "y"), *unbounded(need, "x"), *not_stored(need, "norm_weight", self.element.value),
            *(reason for name in ("weight", *self.matrices) for reason in not_stored(need, name, self.element.value)),
            *(f"{name} has {n} rows, which is no multiple of {VECTOR}" for name, n in rows.items() if n % VECTOR),
        ]  # fmt: skip
        tokens, fewest = need.operands["x"].shape[0], min(tiles.tokens for tiles in INSTANCES)
        if tokens <= fewest:
            reasons.append(f"{tokens} tokens leave one of two blocks idle: it is for more than {fewest}")
        if self.tiles.parts * DEPTH > need.operands["weight"].shape[1]:
            reasons.append(f"the summed dimension is shared out in {self.tiles.parts} parts of {DEPTH} at least")
        return reasons

    def scratch_bytes(self, need: OpNeed) -> int:
        """The scaled tokens, sums of squares for each token, and sums that clusters hand over."""
        return self._places(need)[1] + handed_bytes(self.tiles, need)

    def _places(self, need: OpNeed) -> tuple[int, int]:
        """Where in scratch the sums of squares begin, and where sums are handed over."""
        tokens, width = need.operands["y"].shape
        squares = -(-2 * tokens * width // 256) * 256
        return squares, squares + -(-4 * tokens * squares_of(self.tiles, need) // 256) * 256

    def project(self, need: OpNeed, context: BindContext) -> tuple[Launch, Normed]:
        """The first launch, and what it leaves to the second."""
        squares, handed = (context.scratch.address + place for place in self._places(need))
        x = Normed(context.scratch.address, squares, squares_of(self.tiles, need))
        return multiply(self.tiles, INSTANCES[self.tiles], need, context, handed, x), x

    def second(self, need: OpNeed) -> tuple[Tiles, str]:
        """Tiles and module of the second launch."""
        rows = sum(need.operands[name].shape[0] for name in self.matrices)
        tokens, width = need.operands["y"].shape
        return min(self.instances.items(), key=lambda each: each[0].time(tokens, rows, width))


class LinearAddGateUp(_Chained):
    """From attention to the middle of the feed-forward network."""

    op, name = "linear_add_norm_gate_up_silu", "linear_add_gate_up"
    matrices = ("gate_weight", "up_weight")
    instances = GATE_UP

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_type(need, self.element, "z")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        first, x = self.project(need, context)
        return first, gate_up(*self.second(need), need, context, x, "z")


class LinearAddQkv(_Chained):
    """From the end of one layer to the attention of the next."""

    op = "linear_add_norm_qkv_rope_append"
    matrices = ("q_weight", "k_weight", "v_weight")

    def __init__(self, head_dim: int, tiles: Tiles) -> None:
        self.head_dim = head_dim
        self.name = f"linear_add_qkv_{head_dim}"
        self.instances = UNNORMED[head_dim]
        super().__init__(tiles)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *super().refusals(need), *other_type(need, self.element, "q"), *other_cache(need, self.element),
            *unrotated(need, self.head_dim),
        ]  # fmt: skip

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        first, x = self.project(need, context)
        return first, qkv(*self.second(need), need, context, x)


def prompt_chains() -> list[OpImplementation]:
    """All of them."""
    return [
        *(LinearAddGateUp(tiles) for tiles in INSTANCES),
        *(LinearAddQkv(head_dim, tiles) for head_dim in UNNORMED for tiles in INSTANCES),
    ]
