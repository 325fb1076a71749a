"""The references of norms of heads and of gates, head by head."""

import numpy as np

from atlas_core.ops.primitives import PRIMITIVES

X = np.random.default_rng(3).standard_normal((5, 12)).astype(np.float32)
GATE = np.random.default_rng(4).standard_normal((5, 12)).astype(np.float32)
WEIGHT = np.array([0.5, 1.0, 2.0, -1.0], np.float32)


def run(op, attrs=None, **arrays):
    PRIMITIVES[op].reference(arrays, attrs or {})
    return arrays["y"]


def test_every_head_has_a_norm_of_its_own():
    got = run("head_rms_norm", {"eps": 1e-3}, x=X, weight=WEIGHT)
    for head in range(3):
        part = X[:, 4 * head : 4 * head + 4].astype(float)
        want = run("rms_norm", {"eps": 1e-3}, x=part, weight=WEIGHT)
        np.testing.assert_allclose(got[:, 4 * head : 4 * head + 4], want, rtol=1e-6)


def test_the_gate_comes_after_the_norm():
    got = run("gated_rms_norm", {"eps": 1e-3}, x=X, gate=GATE, weight=WEIGHT)
    gate = GATE.astype(float)
    want = run("head_rms_norm", {"eps": 1e-3}, x=X, weight=WEIGHT) * (gate / (1 + np.exp(-gate)))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_leading_heads_get_length_one_and_the_rest_passes():
    got = run("l2_norm", {"heads": 2, "head_dim": 5, "eps": 0.0}, x=X)
    np.testing.assert_allclose(np.linalg.norm(got[:, :10].reshape(5, 2, 5), axis=-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(got[:, :5] * np.linalg.norm(X[:, :5], axis=-1, keepdims=True), X[:, :5], rtol=1e-6)
    np.testing.assert_array_equal(got[:, 10:], X[:, 10:])
    small = run("l2_norm", {"heads": 1, "head_dim": 12, "eps": 1e6}, x=X)
    np.testing.assert_allclose(small, X / np.sqrt((X.astype(float) ** 2).sum(-1, keepdims=True) + 1e6), rtol=1e-6)


def test_a_gate_for_each_feature_or_for_the_row():
    want = X / (1 + np.exp(-GATE.astype(float)))
    np.testing.assert_allclose(run("sigmoid_mul", x=X, gate=GATE), want, rtol=1e-6)
    one = run("sigmoid_mul", x=X, gate=GATE[:, :1])
    np.testing.assert_allclose(one, X / (1 + np.exp(-GATE[:, :1].astype(float))), rtol=1e-6)
    extreme = np.array([[-200.0, 200.0]], np.float32)
    assert run("sigmoid_mul", x=np.ones((1, 2), np.float32), gate=extreme).tolist() == [[0.0, 1.0]]
