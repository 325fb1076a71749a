"""Mixtures of experts: which experts a token goes to, and what they make of it."""

import numpy as np

from atlas_core.ops.contract import Arrays, Op, Operand, Tolerance
from atlas_core.ops.heads import sigmoid
from atlas_core.ops.references import Attrs
from atlas_core.ops.tolerances import SUMMED
from atlas_core.vocab.dtype import DType

_I32, _F32 = DType.I32, DType.F32
_LOGITS = Operand("logits", "activation", dtype=_F32)
_EXPERTS, _WEIGHTS = Operand("experts", "activation", "out", _I32), Operand("weights", "activation", "out", _F32)
_ROUTED = {_F32: Tolerance(1e-5, 1e-7)}
_TINY = 1e-20
"""Added to the sum of chosen sigmoids before dividing by it, as models are trained."""


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the ``count`` largest of each row, largest first; of equal ones the first."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def moe_route(a: Arrays, attrs: Attrs) -> None:
    """softmax over all experts, of which the ``top_k`` likeliest are taken (Shazeer et al., 2017), likeliest first.

    ``normalise``: their probabilities are made to sum up to one. ``scale`` multiplies them. Of equal ones the first is taken.
    """
    logits = a["logits"].astype(np.float64)
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    experts = _best(logits, attrs["top_k"])
    chosen = np.take_along_axis(odds, experts, -1)
    total = (chosen if attrs["normalise"] else odds).sum(-1, keepdims=True)
    a["experts"], a["weights"] = experts.astype(np.int32), (chosen / total * attrs["scale"]).astype(np.float32)


def moe_route_sigmoid(a: Arrays, attrs: Attrs) -> None:
    """sigmoid of each expert; ``bias`` [experts] is added for the choice only (DeepSeek-V3, 2024).

    Experts lie in ``groups`` of equal size; only the ``top_groups`` whose two best biased scores have the largest sum are
    chosen from. ``normalise``: the chosen sigmoids are divided by their sum. ``scale`` multiplies the weights.
    """
    # In float32, as kernels compute it: which expert is chosen must not hang on digits that no kernel has.
    scores = sigmoid(a["logits"]).astype(np.float32)
    biased = scores + a["bias"].astype(np.float32)
    rows, count = biased.shape
    grouped = biased.reshape(rows, attrs["groups"], count // attrs["groups"])
    strength = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
    taken = np.zeros(strength.shape, bool)
    np.put_along_axis(taken, _best(strength, attrs["top_groups"]), values=True, axis=-1)
    experts = _best(np.where(taken[..., None], grouped, -np.inf).reshape(rows, count), attrs["top_k"])
    weights = np.take_along_axis(scores, experts, -1).astype(np.float64)
    if attrs["normalise"]:
        weights /= weights.sum(-1, keepdims=True) + _TINY
    a["experts"], a["weights"] = experts.astype(np.int32), (weights * attrs["scale"]).astype(np.float32)


def moe_experts(a: Arrays, attrs: Attrs) -> None:
    """Σ weights · down(silu(gate·x) · (up·x)) over the experts of each token.

    x [T, hidden], experts and weights [T, k], gate and up [experts, size, hidden], down [experts, hidden, size].
    """
    x = a["x"].astype(np.float64)
    y = np.zeros((len(x), a["down"].shape[1]))
    for expert in np.unique(a["experts"]):
        tokens, places = np.nonzero(a["experts"] == expert)
        gate = x[tokens] @ a["gate"][expert].astype(np.float64).T
        inner = gate * sigmoid(gate) * (x[tokens] @ a["up"][expert].astype(np.float64).T)
        out = inner @ a["down"][expert].astype(np.float64).T
        np.add.at(y, tokens, out * a["weights"][tokens, places].astype(np.float64)[:, None])
    a["y"] = y.astype(np.float32)


MOE_OPS = (
    Op(
        "moe_route",
        (_LOGITS, _EXPERTS, _WEIGHTS),
        ("top_k", "normalise", "scale"),
        moe_route,
        _ROUTED,
        summary="experts of a token by softmax",
    ),
    Op(
        "moe_route_sigmoid",
        (_LOGITS, Operand("bias", "weight"), _EXPERTS, _WEIGHTS),
        ("top_k", "groups", "top_groups", "normalise", "scale"),
        moe_route_sigmoid,
        _ROUTED,
        summary="experts of a token by sigmoid, biased, from the best groups",
    ),
    Op(
        "moe_experts",
        (
            Operand("x", "activation"),
            Operand("experts", "activation", dtype=_I32),
            Operand("weights", "activation", dtype=_F32),
            Operand("gate", "weight"),
            Operand("up", "weight"),
            Operand("down", "weight"),
            Operand("y", "activation", "out"),
        ),
        (),
        moe_experts,
        SUMMED,
        lambda shapes, attrs: 6 * shapes["experts"][0] * shapes["experts"][1] * shapes["gate"][1] * shapes["gate"][2],
        "SwiGLU of each token's experts, weighted",
    ),
)
