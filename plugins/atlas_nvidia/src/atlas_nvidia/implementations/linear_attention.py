"""What stands around the gated delta rule: the convolution before it, norms of heads, and a whole decode step in one launch."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.kernel import Arg, Geometry, f32, i32, ptr
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    VECTOR,
    Implementation,
    addresses,
    live_word,
    no_vector,
    not_fast,
    other_type,
    ragged,
    unbounded,
    vector_type,
)

WIDTH = 4
"""Taps of the convolutions that there are kernels for (causal_conv.cu)."""
DIM = 128
"""Size of the heads of linear_attention.cu."""
_STEP_BYTES = 4 * (DIM * DIM + 8 * 2 * DIM + 3 * DIM + 8 * 3)
"""The struct Shared of linear_attention.cu: a state, products of 8 warps, inputs, squares."""
MAX_CLUSTER = 8
"""Blocks of a cluster that every device with clusters can hold together."""
_CHANNELS = 4
"""Channels of a thread of causal_conv.cu."""
_RUN = 32
"""Tokens that a thread convolves one after another where rows bring many."""


def layer_of(need: OpNeed, context: BindContext, state: str = "state", layer: str = "layer") -> Arg:
    """Where the states of this node's layer start."""
    buffer = context.operands[state]
    return ptr(buffer.address + need.attrs[layer] * (buffer.nbytes // need.operands[state].shape[0]))


def other_head(name: str, dim: int, vector: int) -> list[str]:
    """Refusals of heads that are not shared out to 2ⁿ lanes of one warp, ``vector`` features each."""
    lanes = dim // vector
    if dim % vector == 0 and 1 <= lanes <= 32 and lanes & (lanes - 1) == 0:
        return []
    return [f"{name} is {dim}, not {vector} times a power of two up to 32"]


class CausalConv1d(Implementation):
    """A thread has 4 channels of a run of tokens."""

    op, name = "causal_conv1d", "causal_conv1d"
    module, entry = "causal_conv", "causal_conv1d"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        width = need.operands["weight"].shape[1]
        reasons = [
            *not_fast(need, self.element), *other_type(need, self.element, "x", "y"), *no_vector(need, "weight"),
            *ragged(need, "x"),
        ]  # fmt: skip
        if width != WIDTH:
            reasons.append(f"the convolution has {width} taps, and there are kernels for {WIDTH}")
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        channels = need.operands["x"].shape[1]
        run = 1 if need.max_query == 1 else _RUN
        # Each row may end within a run: so many runs cover every division of the tokens.
        runs = need.sequences if run == 1 else need.tokens // run + need.sequences
        args = [
            ptr(context.counts), *addresses(context, "x", "weight", "cu_q", "row_slot", "slots"), layer_of(need, context),
            *addresses(context, "y"), i32(channels), i32(need.attrs["slot_stride"]), i32(need.sequences), i32(run),
            vector_type(need, "weight"), *self._own(need),
        ]  # fmt: skip
        return self.launch(context, Geometry((runs, -(-channels // (_CHANNELS * 256)), 1), (256, 1, 1)), args)

    def _own(self, need: OpNeed) -> list[Arg]:
        """What follows the arguments that both entries share."""
        return []


class ConvL2Norm(CausalConv1d):
    """Lengths of heads while they are at hand."""

    op, name, entry = "conv_l2_norm", "conv_l2_norm", "conv_l2_norm"
    rank = 20

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_head("head_dim", need.attrs["head_dim"], _CHANNELS)]

    def _own(self, need: OpNeed) -> list[Arg]:
        return [i32(need.attrs["heads"]), i32(need.attrs["head_dim"]), f32(need.attrs["eps"])]


class _HeadRows(Implementation):
    """8 features a thread, columns of a row a block."""

    module = "linear_norms"
    activations: tuple[str, ...]

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, self.element, *self.activations), *ragged(need, "x"),
            *unbounded(need, "x"), *other_head("head_dim", self.head_dim(need), VECTOR),
        ]  # fmt: skip

    def head_dim(self, need: OpNeed) -> int:
        """Features of a head."""
        raise NotImplementedError

    def rows(self, need: OpNeed, context: BindContext, *args: Arg) -> Sequence[Launch]:
        """The launch over all rows of the bucket."""
        rows, width = need.operands["x"].shape
        geometry = Geometry((rows, -(-width // (VECTOR * 256)), 1), (256, 1, 1))
        return self.launch(context, geometry, [ptr(context.counts), live_word(need.operands["x"]), *args])


class L2Norm(_HeadRows):
    """Queries and keys of linear attention."""

    op, name, entry, activations = "l2_norm", "l2_norm", "l2_norm", ("x", "y")

    def head_dim(self, need: OpNeed) -> int:
        """See _HeadRows."""
        return int(need.attrs["head_dim"])

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs, width = need.attrs, need.operands["x"].shape[1]
        sizes = i32(width), i32(attrs["heads"]), i32(attrs["head_dim"]), f32(attrs["eps"])
        return self.rows(need, context, *addresses(context, "x", "y"), *sizes)


class GatedRmsNorm(_HeadRows):
    """Results of linear attention."""

    op, name, entry, activations = "gated_rms_norm", "gated_rms_norm", "gated_rms_norm", ("x", "gate", "y")

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *no_vector(need, "weight")]

    def head_dim(self, need: OpNeed) -> int:
        """See _HeadRows."""
        return need.operands["weight"].shape[0]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        sizes = i32(need.operands["x"].shape[1]), i32(self.head_dim(need)), f32(need.attrs["eps"])
        operands = addresses(context, "x", "gate", "weight", "y")
        return self.rows(need, context, *operands, *sizes, vector_type(need, "weight"))


class LinearAttentionStep(Implementation):
    """One token a sequence, heads of 128: a block has a value head of one row. Those of a key head are a cluster."""

    op, name = "linear_attention_step", "linear_attention_step"
    module, entry = "linear_attention", "linear_attention_step"
    rank = 50

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        attrs = need.attrs
        reasons = [
            *not_fast(need, self.element), *other_type(need, self.element, "qkv", "a", "b", "gate", "y"),
            *(r for name in ("filters", "a_log", "dt_bias", "norm_weight") for r in no_vector(need, name)),
        ]  # fmt: skip
        if need.max_query != 1:
            reasons.append(f"sequences bring up to {need.max_query} tokens, and it takes one")
        width = need.operands["filters"].shape[1]
        if width != WIDTH:
            reasons.append(f"the convolution has {width} taps, and there are kernels for {WIDTH}")
        norm = need.operands["norm_weight"].shape[0]
        if {attrs["key_dim"], attrs["value_dim"], norm} != {DIM}:
            reasons.append(f"heads are of {attrs['key_dim']}, {attrs['value_dim']} and {norm}: it takes {DIM} only")
        if attrs["unit_heads"] != 2 * attrs["key_heads"]:
            reasons.append(f"{attrs['unit_heads']} heads are brought to length one, not all of queries and keys")
        shared = attrs["value_heads"] // attrs["key_heads"]
        if shared > MAX_CLUSTER:
            reasons.append(f"{shared} value heads share a key head, and a cluster has {MAX_CLUSTER} blocks")
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs = need.attrs
        shared = attrs["value_heads"] // attrs["key_heads"]
        names = (
            "qkv", "a", "b", "gate", "filters", "a_log", "dt_bias", "norm_weight", "cu_q", "row_slot", "slots",
        )  # fmt: skip
        args = [
            ptr(context.counts), *addresses(context, *names), layer_of(need, context, "conv_state", "conv_layer"),
            layer_of(need, context), *addresses(context, "y"), i32(attrs["key_heads"]), i32(attrs["value_heads"]),
            i32(attrs["slot_stride"]), *(f32(attrs[name]) for name in ("scale", "l2_eps", "norm_eps")),
            *(vector_type(need, name) for name in ("filters", "a_log", "dt_bias", "norm_weight")),
        ]  # fmt: skip
        geometry = Geometry((shared, attrs["key_heads"], need.sequences), (256, 1, 1), _STEP_BYTES)
        return self.launch(context, geometry, args, cluster=(shared, 1, 1))


ALL: tuple[OpImplementation, ...] = tuple(
    each
    for element in ELEMENTS
    for each in (
        *(make(element) for make in (CausalConv1d, ConvL2Norm, L2Norm, GatedRmsNorm)),
        LinearAttentionStep(element),
    )
)
