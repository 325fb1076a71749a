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


def _rope(x: str, y: str, heads: str) -> FusedCall:
    operands = {"x": x, "positions": "positions", "inv_freq": "inv_freq", "y": y}
    return FusedCall("rope", operands, {"heads": heads, "head_dim": "head_dim", "scale": "rope_scale"})


NORM_QKV_ROPE_APPEND = FusedOp(
    "norm_qkv_rope_append",
    (
        FusedCall("rms_norm", {"x": "x", "weight": "norm_weight", "y": "normed"}, {"eps": "eps"}),
        FusedCall("linear", {"x": "normed", "weight": "q_weight", "y": "q_plain"}),
        FusedCall("linear", {"x": "normed", "weight": "k_weight", "y": "k_plain"}),
        FusedCall("linear", {"x": "normed", "weight": "v_weight", "y": "v"}),
        _rope("q_plain", "q", "q_heads"),
        _rope("k_plain", "k", "kv_heads"),
        FusedCall(
            "kv_append",
            {
                "k": "k", "v": "v", "positions": "positions", "token_row": "token_row", "row_slot": "row_slot", "slots": "slots",
                "cache": "cache",
            },
            {name: name for name in _CACHE},
        ),
    ),
    ("q",),
)  # fmt: skip
"""Everything of a layer before its attention."""


def fused_ops() -> list[FusedOp]:
    """All of them."""
    return [NORM_QKV_ROPE_APPEND, NORM_GATE_UP_SILU, LINEAR_ADD]
