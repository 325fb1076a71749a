"""The chunked form of the gated delta rule, as kernels for prompts compute it, is the recurrence that defines the op."""

from itertools import pairwise

import numpy as np
import pytest

from atlas_core.ops.recurrent import gated_delta_rule
from atlas_core.ops.recurrent_cases import GENERATORS
from atlas_core.ops.step import Word

CHUNK = 64


def chunked(arrays, attrs, dtype=np.float64):
    """(y, state) by the WY form of Yang et al. (2024) in chunks that end at absolute multiples of CHUNK.

    What tensor cores would multiply is rounded to ``dtype``; sums are float64.
    """
    keys, dim, heads, value_dim = (attrs[n] for n in ("key_heads", "key_dim", "value_heads", "value_dim"))

    def rounded(x):
        return x.astype(dtype).astype(np.float64)

    def by_head(part, count, size):
        return np.repeat(part.reshape(-1, count, size), heads // count, axis=1).astype(np.float64)

    q, k, v = np.split(arrays["qkv"], (keys * dim, 2 * keys * dim), axis=1)
    q, k, v = by_head(q, keys, dim), by_head(k, keys, dim), by_head(v, heads, value_dim)
    log_decay = -np.exp(arrays["a_log"]) * np.logaddexp(0, arrays["a"].astype(np.float64) + arrays["dt_bias"])
    beta = 1 / (1 + np.exp(-arrays["b"].astype(np.float64)))
    state = arrays["state"][attrs["layer"]].astype(np.float64)
    after, y = state.copy(), np.zeros((len(q), heads, value_dim))
    for row, slot in enumerate(arrays["row_slot"]):
        first, end = map(int, arrays["cu_q"][row : row + 2])
        if first == end:
            continue
        words = arrays["slots"][int(slot) * attrs["slot_stride"] :]
        start = int(words[Word.POSITION])
        s = state[words[Word.STATE_IN]].copy() if start else np.zeros(state.shape[1:])
        borders = range((start // CHUNK + 1) * CHUNK, start + end - first, CHUNK)
        for low, high in pairwise([first, *(first + at - start for at in borders), end]):
            for h in range(heads):
                c = np.cumsum(log_decay[low:high, h])
                d = np.tril(np.exp(np.minimum(c[:, None] - c, 0)))
                query, key, b = q[low:high, h], k[low:high, h], beta[low:high, h]
                system = np.eye(len(c)) + b[:, None] * np.tril(key @ key.T * d, -1)
                t = rounded(np.linalg.inv(system) * b)
                products = rounded(attrs["scale"] * (query @ key.T) * d)
                error = rounded(v[low:high, h] - np.exp(c)[:, None] * (key @ rounded(s[h])))
                change = t @ error
                old = attrs["scale"] * np.exp(c)[:, None] * (query @ rounded(s[h]))
                y[low:high, h] = old + products @ rounded(change)
                s[h] = np.exp(c[-1]) * s[h] + key.T @ rounded(np.exp(c[-1] - c)[:, None] * change)
        after[words[Word.STATE_OUT]] = s
    return y.reshape(len(q), -1), after


def cases():
    for trial in GENERATORS["gated_delta_rule"](np.random.default_rng(3), False):
        yield pytest.param(trial.first, id=f"{trial.label} first")
        yield pytest.param(trial.second, id=f"{trial.label} second")


@pytest.mark.parametrize("case", list(cases()))
def test_chunks_are_the_recurrence(case):
    y, state = chunked(case.arrays, case.attrs)
    arrays = {name: array.copy() for name, array in case.arrays.items()}
    gated_delta_rule(arrays, case.attrs)
    np.testing.assert_allclose(arrays["y"], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(arrays["state"][case.attrs["layer"]], state, rtol=1e-5, atol=1e-5)
    assert len(y) == 0 or np.abs(y).max() > 0.01


def test_pieces_that_end_at_multiples_of_a_chunk_have_the_bits_of_the_whole():
    """Rounded as tensor cores round: only the same chunks have the same bits."""
    case = list(GENERATORS["gated_delta_rule"](np.random.default_rng(3), False))[3].first
    attrs, whole = case.attrs, {name: array.copy() for name, array in case.arrays.items()}
    tokens = int(whole["cu_q"][1])
    assert tokens == 70
    assert int(whole["slots"][int(whole["row_slot"][0]) * attrs["slot_stride"] + Word.POSITION]) == 0
    y, state = chunked(whole, attrs, np.float16)
    for border, same in ((64, True), (33, False)):
        halves, start = [], 0
        arrays = {name: array.copy() for name, array in whole.items()}
        position = int(arrays["row_slot"][0]) * attrs["slot_stride"] + Word.POSITION
        arrays["state"] = arrays["state"].astype(np.float64)
        for end in (border, tokens):
            part = {**arrays, **{name: arrays[name][start:end] for name in ("qkv", "a", "b")}}
            part["cu_q"] = np.array([0, end - start], np.int32)
            part["slots"] = arrays["slots"].copy()
            part["slots"][position] = start
            part["slots"][position - Word.POSITION + Word.STATE_IN] = part["slots"][
                position - Word.POSITION + Word.STATE_OUT
            ]
            half, arrays["state"][attrs["layer"]] = chunked(part, attrs, np.float16)
            halves.append(half)
            start = end
        assert (np.concatenate(halves) == y).all() == same
        place = whole["slots"][position - Word.POSITION + Word.STATE_OUT]
        assert (arrays["state"][attrs["layer"]][place] == state[place]).all() == same
