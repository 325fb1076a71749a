"""Fused ops of Hopper alone: a projection into the residual stream with what follows its norm, each defined by its decomposition."""

from atlas_core.contracts.ops import FusedCall, FusedOp
from atlas_nvidia.fused import LINEAR_ADD, NORM_GATE_UP_SILU, NORM_QKV_ROPE_APPEND

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


def fused_ops() -> list[FusedOp]:
    """Both."""
    return [LINEAR_ADD_GATE_UP, LINEAR_ADD_QKV]
