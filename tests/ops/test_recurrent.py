"""The references of linear attention against formulations that share nothing with them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.ops.batch import BatchShape, make_batch
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.step import Word

RNG = np.random.default_rng
SHAPE = BatchShape.for_room(3, 64, 16)
HEADS, VALUES, DIM, WIDE = 2, 4, 5, 3


def run(op, batch, attrs, **arrays):
    arrays |= {"cu_q": batch.cu_q, "row_slot": batch.row_slot, "slots": batch.slots}
    PRIMITIVES[op].reference(arrays, {"layer": 0, "slot_stride": SHAPE.layout.stride, **attrs})
    return arrays["y"]


def batch_of(queries, contexts):
    return make_batch(RNG(0), SHAPE, queries, contexts)  # the same slots every time


def in_pieces(op, pieces, state, tokens, attrs, fixed):
    """One sequence in pieces of these sizes, its per-token arrays in ``tokens``."""
    done, out = 0, []
    for size in pieces:
        part = {name: array[done : done + size] for name, array in tokens.items()}
        out.append(run(op, batch_of((size,), (done,)), attrs, state=state, **part, **fixed))
        done += size
    return np.concatenate(out)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(2, 5))
def test_the_convolution_of_a_whole_sequence(seed, pieces, width):
    rng = RNG(seed)
    x = rng.standard_normal((sum(pieces), 3)).astype(np.float32)
    weight = rng.standard_normal((3, width)).astype(np.float32)
    state = rng.standard_normal((1, SHAPE.layout.slots, width - 1, 3)).astype(np.float32)
    got = in_pieces("causal_conv1d", pieces, state, {"x": x}, {}, {"weight": weight})
    full = np.stack([np.convolve(x[:, c].astype(float), weight[c, ::-1])[: len(x)] for c in range(3)], axis=-1)
    np.testing.assert_allclose(got, full / (1 + np.exp(-full)), rtol=1e-5, atol=1e-6)
    kept = np.concatenate([np.zeros((width - 1, 3)), x])[-(width - 1) :]
    np.testing.assert_array_equal(state[0, batch_of((1,), (0,)).row_slot[0]], kept)


def delta_inputs(rng, tokens):
    k = rng.standard_normal((tokens, 2 * HEADS, DIM))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    qkv = np.concatenate([k.reshape(tokens, -1), rng.standard_normal((tokens, VALUES * WIDE))], axis=-1)
    return {name: array.astype(np.float32) for name, array in (
        ("qkv", qkv), ("a", rng.standard_normal((tokens, VALUES))), ("b", rng.standard_normal((tokens, VALUES))),
    )}  # fmt: skip


FIXED = {
    "a_log": np.array([0.0, 1.0, -1.0, 0.5], np.float32), "dt_bias": np.array([0.1, -2.0, 0.0, 1.0], np.float32),
}  # fmt: skip
ATTRS = {"key_heads": HEADS, "value_heads": VALUES, "key_dim": DIM, "value_dim": WIDE, "scale": 0.3}


def paper(tokens):
    """The rule as it is published, one transposed state a head: S ← α·S·(I - β·k·kᵀ) + β·v·kᵀ, y = S·q."""
    qkv = tokens["qkv"].astype(float)
    y = np.zeros((len(qkv), VALUES, WIDE))
    for head in range(VALUES):
        key = head // (VALUES // HEADS)
        s = np.zeros((WIDE, DIM))
        for t, row in enumerate(qkv):
            q, k = row[key * DIM : (key + 1) * DIM], row[(HEADS + key) * DIM : (HEADS + key + 1) * DIM]
            v = row[2 * HEADS * DIM + head * WIDE :][:WIDE]
            alpha = np.exp(
                -np.exp(FIXED["a_log"][head]) * np.log1p(np.exp(tokens["a"][t, head] + FIXED["dt_bias"][head]))
            )
            beta = 1 / (1 + np.exp(-tokens["b"][t, head]))
            s = alpha * s @ (np.eye(DIM) - beta * np.outer(k, k)) + beta * np.outer(v, k)
            y[t, head] = s @ q * 0.3
    return y.reshape(len(qkv), -1)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_delta_rule_as_published(seed, pieces):
    rng = RNG(seed)
    tokens = delta_inputs(rng, sum(pieces))
    state = rng.standard_normal((1, SHAPE.layout.slots, VALUES, DIM, WIDE)).astype(np.float32)
    got = in_pieces("gated_delta_rule", pieces, state, tokens, ATTRS, FIXED)
    np.testing.assert_allclose(got, paper(tokens), rtol=2e-5, atol=2e-6)


def test_a_slot_that_was_used_starts_from_nothing():
    rng = RNG(2)
    old, new = delta_inputs(rng, 12), delta_inputs(rng, 7)
    used = np.full((1, SHAPE.layout.slots, VALUES, DIM, WIDE), np.nan, np.float32)
    in_pieces("gated_delta_rule", (12,), used, old, ATTRS, FIXED)
    got = in_pieces("gated_delta_rule", (7,), used, new, ATTRS, FIXED)
    clean = in_pieces("gated_delta_rule", (7,), np.zeros_like(used), new, ATTRS, FIXED)
    np.testing.assert_array_equal(got, clean)


def test_rows_and_layers_do_not_meet():
    """Two rows and an empty one: each gets what it gets alone; the empty row's state and the other layer stay as they are."""
    rng = RNG(3)
    one, two = delta_inputs(rng, 4), delta_inputs(rng, 2)
    both = {name: np.concatenate([one[name], two[name]]) for name in one}
    state = rng.standard_normal((2, SHAPE.layout.slots, VALUES, DIM, WIDE)).astype(np.float32)
    before = state.copy()
    batch = batch_of((4, 0, 2), (0, 0, 5))
    got = run("gated_delta_rule", batch, {**ATTRS, "layer": 1}, state=state, **both, **FIXED)
    np.testing.assert_allclose(got[:4], paper(one), rtol=2e-5, atol=2e-6)
    assert np.abs(got[4:] - paper(two)).max() > 0.01, "a row at position 5 goes on from its state"
    np.testing.assert_array_equal(state[0], before[0])
    changed = [slot for slot in range(SHAPE.layout.slots) if not np.array_equal(state[1, slot], before[1, slot])]
    assert changed == sorted([batch.row_slot[0], batch.row_slot[2]])


def test_a_state_may_be_read_in_one_place_and_written_in_another():
    """What a fork is: the old state stays as it was, and the new one is that of going on from it."""
    rng = RNG(4)
    tokens = delta_inputs(rng, 9)
    first, second = ({name: array[part] for name, array in tokens.items()} for part in (slice(5), slice(5, 9)))
    state = np.zeros((1, SHAPE.layout.slots + 1, VALUES, DIM, WIDE), np.float32)
    batch = batch_of((5,), (0,))
    run("gated_delta_rule", batch, ATTRS, state=state, **first, **FIXED)
    held = state.copy()
    batch = batch_of((4,), (5,))
    batch.slots[batch.word(0, Word.STATE_OUT)] = SHAPE.layout.slots
    got = run("gated_delta_rule", batch, ATTRS, state=state, **second, **FIXED)
    np.testing.assert_allclose(got, paper(tokens)[5:], rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(state[0, :-1], held[0, :-1])
    assert np.abs(state[0, -1]).max() > 0
