"""Fused ops of NVIDIA machines, each defined by its decomposition into primitives."""

from atlas_core.contracts.ops import FusedCall, FusedOp

LINEAR_ADD = FusedOp(
    "linear_add",
    (
        FusedCall("linear", {"x": "x", "weight": "weight", "y": "product"}),
        FusedCall("add", {"x": "residual", "z": "product", "y": "y"}),
    ),
    ("y",),
)
"""A projection back into the residual stream."""

NORM_GATE_UP_SILU = FusedOp(
    "norm_gate_up_silu",
    (
        FusedCall("rms_norm", {"x": "x", "weight": "norm_weight", "y": "normed"}, {"eps": "eps"}),
        FusedCall("linear", {"x": "normed", "weight": "gate_weight", "y": "gate"}),
        FusedCall("linear", {"x": "normed", "weight": "up_weight", "y": "up"}),
        FusedCall("silu_mul", {"gate": "gate", "up": "up", "y": "y"}),
    ),
    ("y",),
)
"""The first half of a SwiGLU feed-forward network."""

_CACHE = ("layer", "kv_heads", "head_dim", "page_tokens", "slot_stride", "table_offset")


def _norm(y: str = "normed") -> FusedCall:
    return FusedCall("rms_norm", {"x": "x", "weight": "norm_weight", "y": y}, {"eps": "eps"})


def _linear(part: str, y: str, x: str = "normed") -> FusedCall:
    return FusedCall("linear", {"x": x, "weight": f"{part}_weight", "y": y})


def _bias(part: str, x: str, y: str) -> FusedCall:
    return FusedCall("bias_add", {"x": x, "bias": f"{part}_bias", "y": y})


def _head_norm(part: str, x: str, y: str, eps: str) -> FusedCall:
    return FusedCall("head_rms_norm", {"x": x, "weight": f"{part}_norm", "y": y}, {"eps": eps})


def _rope(x: str, y: str, heads: str) -> FusedCall:
    operands = {"x": x, "positions": "positions", "inv_freq": "inv_freq", "y": y}
    return FusedCall("rope", operands, {"heads": heads, "head_dim": "head_dim", "scale": "rope_scale"})


_APPEND = FusedCall(
    "kv_append",
    {
        "k": "k", "v": "v", "positions": "positions", "token_row": "token_row", "row_slot": "row_slot", "slots": "slots",
        "cache": "cache",
    },
    {name: name for name in _CACHE},
)  # fmt: skip

NORM_QKV_ROPE_APPEND = FusedOp(
    "norm_qkv_rope_append",
    (
        _norm(), _linear("q", "q_plain"), _linear("k", "k_plain"), _linear("v", "v"),
        _rope("q_plain", "q", "q_heads"), _rope("k_plain", "k", "kv_heads"), _APPEND,
    ),
    ("q",),
)  # fmt: skip
"""Everything of a layer before its attention."""

NORM_QKV_BIAS_ROPE_APPEND = FusedOp(
    "norm_qkv_bias_rope_append",
    (
        _norm(), _linear("q", "q_product"), _bias("q", "q_product", "q_plain"), _linear("k", "k_product"),
        _bias("k", "k_product", "k_plain"), _linear("v", "v_product"), _bias("v", "v_product", "v"),
        _rope("q_plain", "q", "q_heads"), _rope("k_plain", "k", "kv_heads"), _APPEND,
    ),
    ("q",),
)  # fmt: skip
"""The same where projections have biases."""

_HEADS = (
    _head_norm("q", "q_plain", "q_normed", "head_eps"), _head_norm("k", "k_plain", "k_normed", "head_eps"),
    _rope("q_normed", "q", "q_heads"), _rope("k_normed", "k", "kv_heads"), _APPEND,
)  # fmt: skip

NORM_QKV_HEADS_ROPE_APPEND = FusedOp(
    "norm_qkv_heads_rope_append",
    (_norm(), _linear("q", "q_plain"), _linear("k", "k_plain"), _linear("v", "v"), *_HEADS),
    ("q",),
)
"""The same where heads of queries and keys are normalised."""

HEADS_ROPE_APPEND = FusedOp("heads_rope_append", _HEADS, ("q",))
"""What lies between such projections and attention."""

_ADD = FusedCall("add", {"x": "residual", "z": "z", "y": "y"})
_EXPERTS = {
    "x": "x", "experts": "experts", "weights": "weights", "gate": "gate", "up": "up", "down": "down",
}  # fmt: skip

NORM_ROUTE = FusedOp(
    "norm_route",
    (
        _norm(), _linear("router", "logits"),
        FusedCall(
            "moe_route", {"logits": "logits", "experts": "experts", "weights": "weights"},
            {"top_k": "top_k", "normalise": "normalise", "scale": "scale"},
        ),
    ),
    ("normed", "experts", "weights"),
)  # fmt: skip
"""The choice of experts."""

MOE_EXPERTS_ADD = FusedOp("moe_experts_add", (FusedCall("moe_experts", {**_EXPERTS, "y": "z"}), _ADD), ("y",))
"""A mixture of experts back into the residual stream."""

MOE_SHARED_ADD = FusedOp(
    "moe_shared_add",
    (
        FusedCall("moe_experts", {**_EXPERTS, "y": "routed"}),
        _linear("shared_gate", "shared_gated", "x"), _linear("shared_up", "shared_upped", "x"),
        FusedCall("silu_mul", {"gate": "shared_gated", "up": "shared_upped", "y": "shared_inner"}),
        _linear("shared_down", "shared", "shared_inner"), _linear("shared", "opening", "x"),
        FusedCall("sigmoid_mul", {"x": "shared", "gate": "opening", "y": "let_in"}),
        FusedCall("add", {"x": "routed", "z": "let_in", "y": "z"}), _ADD,
    ),
    ("y",),
)  # fmt: skip
"""The same with an expert that all tokens have, behind a gate of its own."""

NORM_LINEARS = FusedOp(
    "norm_linears",
    (
        FusedCall("rms_norm", {"x": "x", "weight": "norm_weight", "y": "normed"}, {"eps": "eps"}),
        *(FusedCall("linear", {"x": "normed", "weight": f"weight_{i}", "y": f"y_{i}"}) for i in range(4)),
    ),
    tuple(f"y_{i}" for i in range(4)),
)
"""What linear attention, and attention with a gate behind it, make of the residual stream."""

_STATES = {"cu_q": "cu_q", "row_slot": "row_slot", "slots": "slots"}
CONV_L2_NORM = FusedOp(
    "conv_l2_norm",
    (
        FusedCall(
            "causal_conv1d", {"x": "x", "weight": "weight", **_STATES, "state": "state", "y": "convolved"},
            {"layer": "layer", "slot_stride": "slot_stride"},
        ),
        FusedCall("l2_norm", {"x": "convolved", "y": "y"}, {"heads": "heads", "head_dim": "head_dim", "eps": "eps"}),
    ),
    ("y",),
)  # fmt: skip
"""Queries, keys and values on their way into linear attention."""

LINEAR_ATTENTION_STEP = FusedOp(
    "linear_attention_step",
    (
        FusedCall(
            "causal_conv1d", {"x": "qkv", "weight": "filters", **_STATES, "state": "conv_state", "y": "convolved"},
            {"layer": "conv_layer", "slot_stride": "slot_stride"},
        ),
        FusedCall("l2_norm", {"x": "convolved", "y": "unit"}, {"heads": "unit_heads", "head_dim": "key_dim", "eps": "l2_eps"}),
        FusedCall(
            "gated_delta_rule",
            {
                "qkv": "unit", "a": "a", "b": "b", "a_log": "a_log", "dt_bias": "dt_bias", **_STATES, "state": "state",
                "y": "attended",
            },
            {
                name: name
                for name in (
                    "layer", "key_heads", "value_heads", "key_dim", "value_dim", "scale", "slot_stride",
                )
            },
        ),
        FusedCall(
            "gated_rms_norm", {"x": "attended", "gate": "gate", "weight": "norm_weight", "y": "y"}, {"eps": "norm_eps"}
        ),
    ),
    ("y",),
)  # fmt: skip
"""All of linear attention between its projections."""


_ROWS = {"sample_row": "sample_row", "row_slot": "row_slot", "slots": "slots"}

PROCESS_SAMPLE = FusedOp(
    "process_sample",
    (
        FusedCall(
            "process_logits",
            {"logits": "logits", **_ROWS, "penalty": "penalty", "mask": "mask", "y": "processed"},
            {"slot_stride": "slot_stride", "bias_start": "bias_start"},
        ),
        FusedCall(
            "sample",
            {"logits": "processed", **_ROWS, "cu_q": "cu_q", "sampled": "sampled"},
            {"slot_stride": "slot_stride"},
        ),
    ),
    ("sampled",),
)
"""Logits that nothing changes need not be written again."""


def fused_ops() -> list[FusedOp]:
    """All of them."""
    return [
        NORM_QKV_ROPE_APPEND, NORM_QKV_BIAS_ROPE_APPEND, NORM_QKV_HEADS_ROPE_APPEND, HEADS_ROPE_APPEND, NORM_GATE_UP_SILU,
        LINEAR_ADD, NORM_ROUTE, MOE_EXPERTS_ADD, MOE_SHARED_ADD, NORM_LINEARS,
        LINEAR_ATTENTION_STEP, CONV_L2_NORM, PROCESS_SAMPLE,
    ]  # fmt: skip
