"""Norms of single heads, and products with a gate: what newer attention layers put around queries, keys and results."""

import numpy as np

from atlas_core.ops.contract import Arrays, Op, Operand
from atlas_core.ops.references import Attrs
from atlas_core.ops.tolerances import ROUNDED

_X, _GATE, _Y = Operand("x", "activation"), Operand("gate", "activation"), Operand("y", "activation", "out")
_WEIGHT = Operand("weight", "weight")


def _normalised(x: np.ndarray, dim: int, eps: float) -> np.ndarray:
    """float64 [N, heads, dim], each head over its root mean square."""
    heads = x.reshape(len(x), -1, dim).astype(np.float64)
    result: np.ndarray = heads / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + eps)
    return result


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) in float64, without overflow in either tail."""
    small = np.exp(-np.abs(x.astype(np.float64)))
    result: np.ndarray = np.where(x >= 0, 1, small) / (1 + small)
    return result


def head_rms_norm(a: Arrays, attrs: Attrs) -> None:
    """rms_norm of each head of x [N, heads·d] with one weight [d] (query-key normalisation; Henry et al., 2020)."""
    y = _normalised(a["x"], a["weight"].shape[0], attrs["eps"]) * a["weight"]
    a["y"] = y.reshape(a["x"].shape).astype(np.float32)


def gated_rms_norm(a: Arrays, attrs: Attrs) -> None:
    """head_rms_norm of x, times silu(gate): the gate comes after the norm (Yang et al., 2024)."""
    gate = a["gate"].astype(np.float64)
    y = (_normalised(a["x"], a["weight"].shape[0], attrs["eps"]) * a["weight"]).reshape(gate.shape)
    a["y"] = (y * gate * sigmoid(gate)).astype(np.float32)


def l2_norm(a: Arrays, attrs: Attrs) -> None:
    """x / sqrt(sum(x²) + eps) of each of the first ``heads`` heads of ``head_dim`` features; the rest passes through."""
    width = attrs["heads"] * attrs["head_dim"]
    heads = a["x"][:, :width].reshape(len(a["x"]), attrs["heads"], attrs["head_dim"]).astype(np.float64)
    heads /= np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + attrs["eps"])
    a["y"] = np.concatenate([heads.reshape(-1, width).astype(np.float32), a["x"][:, width:]], axis=-1)


def sigmoid_mul(a: Arrays, attrs: Attrs) -> None:
    """x · sigmoid(gate); gate has as many features as x, or one for the whole row."""
    a["y"] = (a["x"] * sigmoid(a["gate"])).astype(np.float32)


HEAD_OPS = (
    Op(
        "head_rms_norm",
        (_X, _WEIGHT, _Y),
        ("eps",),
        head_rms_norm,
        ROUNDED,
        lambda shapes, attrs: 4 * shapes["x"][0] * shapes["x"][1],
        "root mean square norm of each head",
    ),
    Op(
        "gated_rms_norm",
        (_X, _GATE, _WEIGHT, _Y),
        ("eps",),
        gated_rms_norm,
        ROUNDED,
        lambda shapes, attrs: 9 * shapes["x"][0] * shapes["x"][1],
        "norm of each head, times the silu of a gate",
    ),
    Op("l2_norm", (_X, _Y), ("heads", "head_dim", "eps"), l2_norm, ROUNDED, summary="heads over their length"),
    Op("sigmoid_mul", (_X, _GATE, _Y), (), sigmoid_mul, ROUNDED, summary="product with the sigmoid of a gate"),
)
