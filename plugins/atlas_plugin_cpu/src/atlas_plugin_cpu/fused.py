"""Sequences of primitives that the CPU runs as one: fewer waits, and activations rounded once for several weights."""

from atlas_core.contracts.ops import FusedCall, FusedOp

NORM = FusedCall("rms_norm", {"x": "x", "weight": "norm_weight", "y": "normed"}, {"eps": "eps"})


def _linear(weight: str, y: str, x: str = "normed") -> FusedCall:
    return FusedCall("linear", {"x": x, "weight": weight, "y": y})


LINEAR_ADD = FusedOp(
    "linear_add",
    (_linear("weight", "product", "x"), FusedCall("add", {"x": "residual", "z": "product", "y": "y"})),
    ("y",),
)
"""A projection back into the residual stream."""

_ATTENTION_ATTRS = (
    "layer", "kv_heads", "head_dim", "page_tokens", "slot_stride", "table_offset", "q_heads", "scale", "window",
)  # fmt: skip

ATTENTION_LINEAR_ADD = FusedOp(
    "attention_linear_add",
    (
        FusedCall(
            "paged_attention",
            {"q": "q", "cu_q": "cu_q", "row_slot": "row_slot", "slots": "slots", "cache": "cache", "y": "attended"},
            {name: name for name in _ATTENTION_ATTRS},
        ),
        _linear("weight", "product", "attended"),
        FusedCall("add", {"x": "residual", "z": "product", "y": "y"}),
    ),
    ("y",),
)
"""Attention, and the projection of what it gives: whether factors may be rounded is told by how that weight is stored."""

NORM_QKV = FusedOp(
    "norm_qkv",
    (NORM, _linear("q_weight", "q"), _linear("k_weight", "k"), _linear("v_weight", "v")),
    ("q", "k", "v"),
)
"""Queries, keys and values."""

NORM_GATE_UP_SILU = FusedOp(
    "norm_gate_up_silu",
    (
        NORM,
        _linear("gate_weight", "gate"),
        _linear("up_weight", "up"),
        FusedCall("silu_mul", {"gate": "gate", "up": "up", "y": "y"}),
    ),
    ("y",),
)
"""The first half of a SwiGLU feed-forward network."""


def fused_ops() -> list[FusedOp]:
    """Every fused op that the CPU knows."""
    return [LINEAR_ADD, ATTENTION_LINEAR_ADD, NORM_QKV, NORM_GATE_UP_SILU]
