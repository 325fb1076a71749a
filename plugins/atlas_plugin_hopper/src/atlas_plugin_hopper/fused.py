"""Fused ops of Hopper alone, each defined by its decomposition: a projection into the residual stream with what follows its norm,
all layers of a decoder, and what comes behind them.
"""

from atlas_core.contracts.ops import FusedCall, FusedOp
from atlas_nvidia.fused import LINEAR_ADD, NORM_GATE_UP_SILU, NORM_QKV_HEADS_ROPE_APPEND, NORM_QKV_ROPE_APPEND
from atlas_plugin_hopper.hybrid import HYBRID_LAYERS, MIXTURE_LAYERS, OUTPUT_MIXTURE

_INNER = {"x": "y", "y": "z"}
"""Operands of the second part: it reads the stream that the first one leaves, and its result needs another name."""


def _behind(name: str, second: FusedOp) -> FusedOp:
    """LINEAR_ADD, then ``second`` on its sum."""
    body = tuple(
        FusedCall(call.op, {inner: _INNER.get(outer, outer) for inner, outer in call.operands.items()}, call.attrs)
        for call in second.body
    )
    outputs = tuple(_INNER.get(name, name) for name in second.outputs)
    return FusedOp(name, (*LINEAR_ADD.body, *body), ("y", *outputs))


LINEAR_ADD_GATE_UP = _behind("linear_add_norm_gate_up_silu", NORM_GATE_UP_SILU)
"""From attention to the middle of the feed-forward network."""
LINEAR_ADD_QKV = _behind("linear_add_norm_qkv_rope_append", NORM_QKV_ROPE_APPEND)
"""From the end of one layer to the attention of the next."""


_PAGES = ("layer", "kv_heads", "head_dim", "page_tokens", "slot_stride", "table_offset")
_ATTENTION = FusedCall(
    "paged_attention",
    {
        "q": "q", "cu_q": "cu_q", "row_slot": "row_slot", "slots": "slots", "cache": "cache", "y": "attended",
    },
    {name: name for name in (*_PAGES, "q_heads", "scale", "window")},
)  # fmt: skip
_OUTPUT = (
    FusedCall("linear", {"x": "attended", "weight": "output_weight", "y": "output"}),
    FusedCall("add", {"x": "x", "z": "output", "y": "middle"}),
)
_FEED_FORWARD = (
    FusedCall("rms_norm", {"x": "middle", "weight": "inner_norm", "y": "inner_normed"}, {"eps": "eps"}),
    FusedCall("linear", {"x": "inner_normed", "weight": "gate_weight", "y": "gate"}),
    FusedCall("linear", {"x": "inner_normed", "weight": "up_weight", "y": "up"}),
    FusedCall("silu_mul", {"gate": "gate", "up": "up", "y": "inner"}),
    FusedCall("linear", {"x": "inner", "weight": "down_weight", "y": "down"}),
    FusedCall("add", {"x": "middle", "z": "down", "y": "y"}),
)


DECODER_LAYERS = FusedOp(
    "decoder_layers", (*NORM_QKV_ROPE_APPEND.body, _ATTENTION, *_OUTPUT, *_FEED_FORWARD), ("y",), carried=("x", "y")
)
"""All layers of a dense decoder, one behind the other."""

_MIXTURE = (
    FusedCall("rms_norm", {"x": "middle", "weight": "inner_norm", "y": "inner_normed"}, {"eps": "eps"}),
    FusedCall("linear", {"x": "inner_normed", "weight": "router_weight", "y": "logits"}),
    FusedCall(
        "moe_route", {"logits": "logits", "experts": "experts", "weights": "weights"},
        {"top_k": "top_k", "normalise": "normalise", "scale": "route_scale"},
    ),
    FusedCall(
        "moe_experts",
        {
            "x": "inner_normed", "experts": "experts", "weights": "weights", "gate": "gate", "up": "up", "down": "down",
            "y": "mixed",
        },
    ),
    FusedCall("add", {"x": "middle", "z": "mixed", "y": "y"}),
)  # fmt: skip
MOE_DECODER_LAYERS = FusedOp(
    "moe_decoder_layers",
    (*NORM_QKV_HEADS_ROPE_APPEND.body, _ATTENTION, *_OUTPUT, *_MIXTURE),
    ("y",),
    carried=("x", "y"),
)
"""The same of a decoder whose layers are mixtures of experts, and whose heads of queries and keys are normalised."""


GATHER_NORM_LINEAR = FusedOp(
    "gather_norm_linear",
    (
        FusedCall("gather_rows", {"x": "x", "logits_rows": "logits_rows", "y": "gathered"}),
        FusedCall("rms_norm", {"x": "gathered", "weight": "norm_weight", "y": "normed"}, {"eps": "eps"}),
        FusedCall("linear", {"x": "normed", "weight": "weight", "y": "y"}),
    ),
    ("y",),
)
"""Logits of the rows where they are wanted."""


def fused_ops() -> list[FusedOp]:
    """All of them."""
    return [
        LINEAR_ADD_GATE_UP, LINEAR_ADD_QKV, DECODER_LAYERS, MOE_DECODER_LAYERS, HYBRID_LAYERS, MIXTURE_LAYERS, OUTPUT_MIXTURE,
        GATHER_NORM_LINEAR,
    ]  # fmt: skip
