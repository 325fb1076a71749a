"""Which experts a token goes to: from logits, or from the residual stream with norm and router in the same launch."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, f32, i32, ptr
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    Implementation,
    addresses,
    live_word,
    no_vector,
    not_fast,
    not_stored,
    other_type,
    ragged,
    shared_limit,
    unbounded,
    vector_type,
)
from atlas_nvidia.implementations.fused import COLUMNS, MAX_CLUSTER, norm_bytes
from atlas_nvidia.implementations.linear import THREADS, streaming_bytes

MAX_EXPERTS, MAX_CHOICES = 1024, 32
"""Experts of a layer, and of a token (route.cuh)."""
STATIC_BYTES = 4 * MAX_EXPERTS + 4 * MAX_CHOICES + 32
"""Shared memory that norm_route has besides: logits, choices, partial sums."""
FEW = 64
"""Tokens up to which norm_route is taken: each eight of them read the router's weights anew."""
DEPTH, DEFAULT_DEPTH = 4, 8
"""GEMV_DEPTH of norm_route, and what ``norm_bytes`` counts with."""


def unroutable(need: OpNeed, experts: int) -> list[str]:
    """Refusals of choices that the kernels cannot make."""
    top_k = need.attrs["top_k"]
    if not 0 < top_k <= min(experts, MAX_CHOICES) or experts > MAX_EXPERTS:
        return [f"it chooses up to {MAX_CHOICES} of up to {MAX_EXPERTS} experts, not {top_k} of {experts}"]
    return []


class MoeRoute(Implementation):
    """One block a token, in float32."""

    op, name = "moe_route", "moe_route"
    module, entry = "moe_route", "moe_route"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*unroutable(need, need.operands["logits"].shape[1]), *unbounded(need, "logits")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        args = [
            ptr(context.counts), live_word(need.operands["logits"]), *addresses(context, "logits", *self.vectors()),
            *addresses(context, "experts", "weights"), i32(need.operands["logits"].shape[1]), i32(need.attrs["top_k"]),
            *self.choice(need), i32(int(need.attrs["normalise"])), f32(need.attrs["scale"]),
            *(vector_type(need, name) for name in self.vectors()),
        ]  # fmt: skip
        return self.launch(context, Geometry((need.operands["logits"].shape[0], 1, 1), (128, 1, 1)), args)

    def vectors(self) -> tuple[str, ...]:
        """Weights of its own."""
        return ()

    def choice(self, need: OpNeed) -> list[Arg]:
        """Arguments of its own."""
        return []


class MoeRouteSigmoid(MoeRoute):
    """Groups first, then experts of the open ones."""

    op = name = entry = "moe_route_sigmoid"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        experts, groups, top = (
            need.operands["logits"].shape[1],
            need.attrs["groups"],
            need.attrs["top_groups"],
        )
        reasons = [*super().refusals(need), *no_vector(need, "bias")]
        if experts % groups or top * (experts // groups) < need.attrs["top_k"]:
            reasons.append(f"{top} of {groups} groups do not hold {need.attrs['top_k']} experts")
        return reasons

    def vectors(self) -> tuple[str, ...]:
        """See MoeRoute."""
        return ("bias",)

    def choice(self, need: OpNeed) -> list[Arg]:
        """See MoeRoute."""
        return [i32(need.attrs["groups"]), i32(need.attrs["top_groups"])]


class NormRoute(Implementation):
    """A cluster for each eight tokens."""

    op, name = "norm_route", "norm_route"
    module, entry = "norm_route", "norm_route"
    rank = 50
    depth = DEPTH

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        tokens, width = need.operands["x"].shape
        reasons = [
            *not_fast(need, self.element), *other_type(need, DType.F32, "x"), *other_type(need, self.element, "normed"),
            *no_vector(need, "norm_weight"), *not_stored(need, "router_weight", self.element.value), *ragged(need, "x"),
            *unbounded(need, "x"), *unroutable(need, need.operands["router_weight"].shape[0]),
        ]  # fmt: skip
        if tokens > FEW:
            reasons.append(f"it takes at most {FEW} tokens, not {tokens}")
        elif self.shared(need) + STATIC_BYTES > shared_limit(need):
            reasons.append(f"{min(tokens, COLUMNS)} rows of {width} do not fit into the shared memory of {need.arch}")
        return reasons

    def shared(self, need: OpNeed) -> int:
        """Bytes of dynamic shared memory."""
        tokens, width = need.operands["x"].shape
        saved = streaming_bytes(COLUMNS, DEFAULT_DEPTH) - streaming_bytes(COLUMNS, self.depth)
        return norm_bytes(width, min(tokens, COLUMNS)) - saved

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, width = need.operands["x"].shape
        args = [
            ptr(context.counts), *addresses(context, "x", "norm_weight", "router_weight", "normed", "experts", "weights"),
            i32(width), i32(need.operands["router_weight"].shape[0]), i32(need.attrs["top_k"]), i32(min(tokens, COLUMNS)),
            f32(need.attrs["eps"]), i32(int(need.attrs["normalise"])), f32(need.attrs["scale"]), vector_type(need, "norm_weight"),
        ]  # fmt: skip
        geometry = Geometry((MAX_CLUSTER, -(-tokens // COLUMNS), 1), (THREADS, 1, 1), self.shared(need))
        return self.launch(context, geometry, args, cluster=(MAX_CLUSTER, 1, 1))


ALL: tuple[OpImplementation, ...] = (
    MoeRoute(), MoeRouteSigmoid(), *(NormRoute(element) for element in ELEMENTS),
)  # fmt: skip
