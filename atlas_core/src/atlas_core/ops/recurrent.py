"""Linear attention: a short causal convolution and the gated delta rule, with states that outlive the step.

States are float32 [layers, places, ...]: what a place holds is all that a sequence's earlier tokens mean to its later ones.
A slot names the place that it reads (STATE_IN) and the one that it writes (STATE_OUT), mostly the same; no place is written by two
rows, or read by one and written by another. A sequence that stands at position 0 starts from zeros and reads none.
"""

import numpy as np

from atlas_core.ops.contract import Arrays, Op, Operand, Tolerance
from atlas_core.ops.heads import sigmoid
from atlas_core.ops.references import Attrs
from atlas_core.ops.step import Word
from atlas_core.ops.tolerances import ROUNDED
from atlas_core.vocab.dtype import DType

_CU_Q = Operand("cu_q", "input", dtype=DType.I32)
_ROW_SLOT = Operand("row_slot", "input", dtype=DType.I32)
_SLOTS = Operand("slots", "state", dtype=DType.I32)
_STATE = Operand("state", "state", "inout", DType.F32)
_Y = Operand("y", "activation", "out")


def _rows(a: Arrays, attrs: Attrs) -> list[tuple[slice, np.ndarray, int]]:
    """(tokens, state before them, place of the state after) of every row that brings tokens."""
    found = []
    state = a["state"][attrs["layer"]]
    for row, slot in enumerate(a["row_slot"]):
        tokens = slice(int(a["cu_q"][row]), int(a["cu_q"][row + 1]))
        if tokens.stop > tokens.start:
            words = a["slots"][int(slot) * attrs["slot_stride"] :]
            fresh = int(words[Word.POSITION]) == 0
            before = np.zeros(state.shape[1:], np.float32) if fresh else state[words[Word.STATE_IN]].copy()
            found.append((tokens, before, int(words[Word.STATE_OUT])))
    return found


def causal_conv1d(a: Arrays, attrs: Attrs) -> None:
    """silu of a depthwise convolution over the sequence, each output seeing its own and earlier inputs only.

    x [T, channels], weight [channels, width] with the own input's tap last. The state [layers, places, width - 1, channels] holds
    the last inputs, oldest first.
    """
    state, weight = a["state"][attrs["layer"]], a["weight"].astype(np.float64)
    width = weight.shape[1]
    y = np.zeros(a["x"].shape, np.float32)
    for tokens, before, place in _rows(a, attrs):
        whole = np.concatenate([before, a["x"][tokens]])
        count = tokens.stop - tokens.start
        taps = np.stack([whole[tap : tap + count] for tap in range(width)], axis=-1).astype(np.float64)
        total = (taps * weight).sum(-1)
        y[tokens] = (total * sigmoid(total)).astype(np.float32)
        state[place] = whole[len(whole) - (width - 1) :]
    a["y"] = y


def gated_delta_rule(a: Arrays, attrs: Attrs) -> None:
    """The recurrence of Gated DeltaNet (Yang et al., 2024), token by token.

    For each value head: S ← α·S, then S ← S + k ⊗ β·(v - Sᵀk), and y = scale·Sᵀq, with α = exp(-exp(a_log)·softplus(a + dt_bias)) and
    β = sigmoid(b). qkv [T, ...] holds queries and keys of ``key_heads`` heads of ``key_dim``, then values of ``value_heads`` heads of
    ``value_dim``; consecutive value heads share a key head. The state [layers, places, value_heads, key_dim, value_dim] is S.
    """
    heads, dim, values, value_dim = (attrs[name] for name in ("key_heads", "key_dim", "value_heads", "value_dim"))
    qkv, width = a["qkv"].astype(np.float64), heads * dim
    q, k = (qkv[:, i * width : (i + 1) * width].reshape(-1, heads, dim) for i in range(2))
    q, k = (np.repeat(part, values // heads, axis=1) for part in (q, k))
    v = qkv[:, 2 * width :].reshape(-1, values, value_dim)
    step = np.logaddexp(0.0, a["a"].astype(np.float64) + a["dt_bias"].astype(np.float64))
    decay = np.exp(-np.exp(a["a_log"].astype(np.float64)) * step)
    beta = sigmoid(a["b"])
    state = a["state"][attrs["layer"]]
    y = np.zeros((len(qkv), values * value_dim), np.float32)
    for tokens, before, place in _rows(a, attrs):
        s = before.astype(np.float64)
        for t in range(tokens.start, tokens.stop):
            s *= decay[t][:, None, None]
            error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, k[t]))
            s += k[t][:, :, None] * error[:, None, :]
            y[t] = (np.einsum("hkv,hk->hv", s, q[t]) * attrs["scale"]).reshape(-1).astype(np.float32)
        state[place] = s.astype(np.float32)
    a["y"] = y


RECURRENT_OPS = (
    Op(
        "causal_conv1d",
        (Operand("x", "activation"), Operand("weight", "weight"), _CU_Q, _ROW_SLOT, _SLOTS, _STATE, _Y),
        ("layer", "slot_stride"),
        causal_conv1d,
        ROUNDED,
        lambda shapes, attrs: 2 * shapes["x"][0] * shapes["weight"][0] * shapes["weight"][1],
        "short convolution over the sequence, silu",
    ),
    Op(
        "gated_delta_rule",
        (
            Operand("qkv", "activation"),
            Operand("a", "activation"),
            Operand("b", "activation"),
            Operand("a_log", "weight"),
            Operand("dt_bias", "weight"),
            _CU_Q,
            _ROW_SLOT,
            _SLOTS,
            _STATE,
            _Y,
        ),
        ("layer", "key_heads", "value_heads", "key_dim", "value_dim", "scale", "slot_stride"),
        gated_delta_rule,
        # Errors of a state of hundreds of tokens are those of sums of as many terms.
        {DType.F32: Tolerance(1e-4, 2e-5), DType.BF16: Tolerance(1.6e-2, 8e-3), DType.F16: Tolerance(2e-3, 1e-3)},
        lambda shapes, attrs: 7 * shapes["qkv"][0] * attrs["value_heads"] * attrs["key_dim"] * attrs["value_dim"],
        "linear attention by the gated delta rule",
    ),
)
