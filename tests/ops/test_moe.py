"""The references of mixtures of experts against one token and one expert at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.ops.primitives import PRIMITIVES

RNG = np.random.default_rng


def run(op, attrs=None, **arrays):
    PRIMITIVES[op].reference(arrays, attrs or {})
    return arrays


@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_the_likeliest_experts_are_taken_with_their_softmax(seed, top_k, normalise):
    logits = RNG(seed).standard_normal((3, 9)).astype(np.float32)
    got = run("moe_route", {"top_k": top_k, "normalise": normalise, "scale": 2.0}, logits=logits)
    for row, experts, weights in zip(logits, got["experts"], got["weights"], strict=True):
        odds = np.exp(row.astype(float)) / np.exp(row.astype(float)).sum()
        assert set(experts) == set(sorted(range(9), key=lambda e: -odds[e])[:top_k])
        want = odds[experts] / (odds[experts].sum() if normalise else 1) * 2
        np.testing.assert_allclose(weights, want, rtol=1e-6)
        assert (np.diff(weights) <= 0).all()


def test_of_equal_logits_the_first_is_taken():
    attrs = {"top_k": 2, "normalise": True, "scale": 1.0}
    got = run("moe_route", attrs, logits=np.array([[0, 1, 1, 1], [2, 2, 2, 2]], np.float32))
    assert got["experts"].tolist() == [[1, 2], [0, 1]]
    assert got["weights"].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_large_logits_do_not_overflow():
    attrs = {"top_k": 2, "normalise": False, "scale": 1.0}
    got = run("moe_route", attrs, logits=np.array([[500.0, 499.0, -800.0]], np.float32))
    np.testing.assert_allclose(got["weights"], [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=1e-6)


def test_a_bias_counts_for_the_choice_and_not_for_the_weight():
    attrs = {"top_k": 1, "groups": 1, "top_groups": 1, "normalise": False, "scale": 1.0}
    logits, bias = np.array([[2.0, 0.0]], np.float32), np.array([0.0, 5.0], np.float32)
    got = run("moe_route_sigmoid", attrs, logits=logits, bias=bias)
    assert got["experts"].tolist() == [[1]]
    assert got["weights"].tolist() == [[0.5]]


def test_closed_groups_are_not_chosen_from():
    """Group 0 has the best expert, group 1 the best pair: with one open group the pair wins."""
    attrs = {"top_k": 2, "groups": 2, "top_groups": 1, "normalise": True, "scale": 3.0}
    logits = np.array([[3.0, -9.0, 2.0, 1.9]], np.float32)
    got = run("moe_route_sigmoid", attrs, logits=logits, bias=np.zeros(4, np.float32))
    assert got["experts"].tolist() == [[2, 3]]
    assert got["weights"].sum() == pytest.approx(3.0)
    both = run("moe_route_sigmoid", {**attrs, "top_groups": 2}, logits=logits, bias=np.zeros(4, np.float32))
    assert both["experts"].tolist() == [[0, 2]]


def test_experts_are_weighted_swiglus():
    rng = RNG(4)
    x = rng.standard_normal((5, 6)).astype(np.float32)
    gate, up = (rng.standard_normal((4, 3, 6)).astype(np.float32) for _ in range(2))
    down = rng.standard_normal((4, 6, 3)).astype(np.float32)
    experts = np.array([[0, 1], [1, 0], [3, 1], [0, 3], [1, 3]], np.int32)
    weights = rng.random((5, 2)).astype(np.float32)
    got = run("moe_experts", x=x, experts=experts, weights=weights, gate=gate, up=up, down=down)["y"]
    for token in range(5):
        want = np.zeros(6)
        for expert, weight in zip(experts[token], weights[token], strict=True):
            g, u = gate[expert].astype(float) @ x[token], up[expert].astype(float) @ x[token]
            want += weight * (down[expert].astype(float) @ (g / (1 + np.exp(-g)) * u))
        np.testing.assert_allclose(got[token], want, rtol=1e-5, atol=1e-6)
