"""The references of the forward ops against formulations that share nothing with them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.ops import references
from atlas_core.ops.arrays import rounded
from atlas_core.ops.batch import BatchShape, make_batch
from atlas_core.ops.cases import fill_cache
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.references import PROMPT_BIT
from atlas_core.ops.step import Word
from atlas_core.vocab.dtype import DType

RNG = np.random.default_rng


def run(op, attrs=None, **arrays):
    PRIMITIVES[op].reference(arrays, attrs or {})
    return arrays


def softmax_attention(q, k, v, scale, window):
    """One head over whole sequences: q [n, d] are the last n of the positions of k and v [m, d]."""
    n, m = len(q), len(k)
    score = q @ k.T * scale
    query, key = np.arange(m - n, m)[:, None], np.arange(m)[None, :]
    hidden = (key > query) | ((key <= query - window) if window else False)
    weight = np.exp(np.where(hidden, -np.inf, score))
    return weight / weight.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_paged_attention_is_softmax_attention_over_the_whole_sequence(heads, kv_heads, window):
    rng, dim, size = RNG(1), 8, 4
    queries, contexts = (3, 1, 0, 6), (5, 11, 3, 0)
    batch = make_batch(rng, BatchShape.for_room(4, 16, size), queries, contexts)
    cache = fill_cache(rng, batch, 1, 0, kv_heads, dim, window)
    q = rng.standard_normal((batch.tokens, heads * dim)).astype(np.float32)
    attrs = {
        "layer": 0, "kv_heads": kv_heads, "head_dim": dim, "page_tokens": size, "q_heads": heads, "scale": 0.3,
        "slot_stride": batch.shape.layout.stride, "table_offset": batch.shape.layout.table_offset(0), "window": window,
    }  # fmt: skip
    got = run("paged_attention", attrs, q=q, cu_q=batch.cu_q, row_slot=batch.row_slot, slots=batch.slots, cache=cache)[
        "y"
    ]
    for row, (query, context) in enumerate(zip(queries, contexts, strict=True)):
        where = [(batch.page(row, p // size), p % size) for p in range(query + context)]
        kv = np.array([cache[0, page, :, :, token] for page, token in where]).reshape(-1, 2, kv_heads, dim)
        rows = slice(batch.cu_q[row], batch.cu_q[row + 1])
        for head in range(heads):
            part = slice(head * dim, (head + 1) * dim)
            shared = head // (heads // kv_heads)
            want = softmax_attention(q[rows, part].astype(float), kv[:, 0, shared], kv[:, 1, shared], 0.3, window)
            np.testing.assert_allclose(got[rows, part], want, rtol=1e-5, atol=1e-6)


def test_kv_append_then_attention_sees_what_was_appended():
    rng, size = RNG(2), 4
    batch = make_batch(rng, BatchShape.for_room(2, 12, size), (2, 5), (3, 4))
    cache = np.full((2, batch.shape.pages, 2, 1, size, 8), -1, np.float32)
    k, v = rng.standard_normal((2, batch.tokens, 8)).astype(np.float32)
    attrs = {
        "layer": 1, "kv_heads": 1, "head_dim": 8, "page_tokens": size, "slot_stride": batch.shape.layout.stride,
        "table_offset": batch.shape.layout.table_offset(0),
    }  # fmt: skip
    run("kv_append", attrs, k=k, v=v, positions=batch.positions, token_row=batch.token_row, row_slot=batch.row_slot,
        slots=batch.slots, cache=cache)  # fmt: skip
    for token, (row, position) in enumerate([(0, 3), (0, 4), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8)]):
        page = cache[1, batch.page(row, position // size)]
        np.testing.assert_array_equal(page[0, 0, position % size], k[token])
        np.testing.assert_array_equal(page[1, 0, position % size], v[token])
    assert (cache != -1).any(axis=-1).sum() == 2 * batch.tokens  # nothing else was written


@pytest.mark.parametrize("half", [4, 3])
def test_rope_is_multiplication_by_a_complex_number_of_unit_length(half):
    rng, dim = RNG(3), 8
    x = rng.standard_normal((5, 2 * dim)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 333], np.int32)
    inv_freq = (10.0 ** -np.arange(half)).astype(np.float32)
    got = run("rope", {"heads": 2, "head_dim": dim, "scale": 1.5}, x=x, positions=positions, inv_freq=inv_freq)["y"]
    heads, turned = x.reshape(5, 2, dim), got.reshape(5, 2, dim)
    number = heads[..., :half] + 1j * heads[..., half : 2 * half]
    want = number * 1.5 * np.exp(1j * positions[:, None, None] * inv_freq)
    np.testing.assert_allclose(turned[..., :half] + 1j * turned[..., half : 2 * half], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(turned[..., 2 * half :], heads[..., 2 * half :])


def test_rope_scores_depend_on_the_distance_only():
    rng = RNG(4)
    q, k = rng.standard_normal((2, 1, 16))
    inv_freq = (100.0 ** (-np.arange(8) / 8)).astype(np.float32)

    def at(x, position):
        attrs = {"heads": 1, "head_dim": 16, "scale": 1.0}
        return run("rope", attrs, x=x, positions=np.array([position], np.int32), inv_freq=inv_freq)["y"][0]

    assert at(q, 9) @ at(k, 4) == pytest.approx(at(q, 105) @ at(k, 100), rel=1e-4)


def test_rms_norm_gives_rows_of_mean_square_one_and_known_values():
    x = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    y = run("rms_norm", {"eps": 0.0 + 1e-30}, x=x, weight=np.array([1.0, 2.0], np.float32))["y"]
    np.testing.assert_allclose(y[0], [3 / np.sqrt(12.5), 8 / np.sqrt(12.5)], rtol=1e-6)
    np.testing.assert_array_equal(y[1], [0, 0])


def test_gates_linear_embed_bias_and_gather_on_values_worked_out_by_hand():
    gate, up = np.array([[0.0, 50.0, -50.0, 1.0]], np.float32), np.array([[7.0, 2.0, 3.0, -1.0]], np.float32)
    silu = run("silu_mul", gate=gate, up=up)["y"]
    np.testing.assert_allclose(silu, [[0.0, 100.0, 0.0, -0.7310586]], atol=1e-6)
    gelu = run(
        "gelu_mul",
        gate=np.array([[0.0, 50.0, -50.0, 1.0, -0.5]], np.float32),
        up=np.array([[7.0, 2.0, 3.0, -1.0, 2.0]], np.float32),
    )["y"]
    np.testing.assert_allclose(gelu, [[0.0, 100.0, 0.0, -0.8411920, -0.3085720]], atol=1e-6)
    x, weight = np.array([[1.0, 2.0]], np.float32), np.array([[3.0, 4.0], [5.0, 6.0], [0.5, 0.25]], np.float32)
    np.testing.assert_array_equal(run("linear", x=x, weight=weight)["y"], [[11.0, 17.0, 1.0]])
    np.testing.assert_array_equal(run("embed", tokens=np.array([2, 0]), weight=weight)["y"], [[0.5, 0.25], [3.0, 4.0]])
    np.testing.assert_array_equal(run("bias_add", x=x, bias=np.array([10.0, 20.0], np.float32))["y"], [[11.0, 22.0]])
    np.testing.assert_array_equal(run("add", x=x, z=x)["y"], [[2.0, 4.0]])
    np.testing.assert_array_equal(run("gather_rows", x=weight, logits_rows=np.array([2, 2]))["y"], weight[[2, 2]])


def test_step_begin_applies_updates_before_rows_read_them_and_counts_what_enters():
    rng = RNG(5)
    batch = make_batch(rng, BatchShape.for_room(2, 16, 4), (1, 3), (6, 2))
    for row in range(2):
        batch.slots[batch.word(row, Word.PENALTY_ROW)] = row
        batch.slots[batch.word(row, Word.PROMPT_LENGTH)] = (6, 4)[row]
    updates = np.array([[batch.word(0, Word.LAST_TOKEN), 5], [batch.word(0, Word.POSITION), 7]], np.int32)
    penalty = np.zeros((2, 8), np.int32)
    got = run(
        "step_begin", {"slot_stride": batch.shape.layout.stride}, updates=updates, slots=batch.slots, penalty=penalty,
        token_ids=np.array([-1, 3, 3, 3], np.int32), cu_q=batch.cu_q, row_slot=batch.row_slot,
    )  # fmt: skip
    np.testing.assert_array_equal(got["tokens"], [5, 3, 3, 3])
    np.testing.assert_array_equal(got["positions"], [7, 2, 3, 4])
    np.testing.assert_array_equal(got["token_row"], [0, 1, 1, 1])
    # Position 7 is behind the prompt of 6: generated. Of the second row two are prompt and one is generated.
    assert penalty[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert penalty[1, 3] == PROMPT_BIT + 1
    assert np.count_nonzero(penalty) == 2


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_rounding_is_idempotent_and_within_half_a_unit(values):
    array = np.array(values, np.float32)
    for dtype, unit in ((DType.BF16, 2.0**-7), (DType.F32, 0.0)):
        once = rounded(array, dtype)
        np.testing.assert_array_equal(rounded(once, dtype), once)
        assert (np.abs(once - array) <= np.abs(array) * unit / 2 + 1e-38).all()
    np.testing.assert_array_equal(rounded(np.arange(3), DType.BF16), np.arange(3))


def test_the_block_table_of_the_right_row_is_used():
    batch = make_batch(RNG(6), BatchShape.for_room(2, 12, 4), (1, 1), (5, 9))
    attrs = {
        "slot_stride": batch.shape.layout.stride,
        "table_offset": batch.shape.layout.table_offset(0),
        "page_tokens": 4,
    }
    pages, tokens = references._blocks(
        {"row_slot": batch.row_slot, "slots": batch.slots}, attrs, 1, np.array([9, 0, 7])
    )
    assert pages.tolist() == [batch.page(1, block) for block in (2, 0, 1)]
    assert tokens.tolist() == [1, 0, 3]
