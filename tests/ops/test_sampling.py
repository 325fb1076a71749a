"""The references between logits and the next token: known answers, and the cases that broke other engines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.ops.batch import BatchShape, float_bits, make_batch
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.references import PROMPT_BIT
from atlas_core.ops.sampling import choose, gumbel
from atlas_core.ops.step import Word
from atlas_core.vocab.sampling import SamplingParams

MASK64 = 2**64 - 1


def splitmix64(state, count):
    """The generator as published, in Python integers: the first ``count`` outputs from ``state``."""
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        yield z ^ (z >> 31)


def test_the_hash_is_splitmix64_with_its_known_answers():
    # First outputs of the reference implementation for seed 1234567.
    assert list(splitmix64(1234567, 3)) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1234567, 5), (MASK64, 4095)])
def test_gumbel_noise_is_the_generator_used_as_a_counter(seed, position):
    key = list(splitmix64(seed, position + 1))[-1] if position < 100 else None
    if key is None:
        key = next(splitmix64((seed + 0x9E3779B97F4A7C15 * position) & MASK64, 1))
    uniform = np.array([((z >> 40) + 0.5) * 2.0**-24 for z in splitmix64(key, 50)])
    np.testing.assert_allclose(gumbel(seed, position, 50), -np.log(-np.log(uniform)), rtol=2e-5, atol=2e-6)


def test_gumbel_noise_is_finite_and_samples_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    drawn = [choose(logits, 1.0, 0, 1.0, 0.0, gumbel(7, position, 4)) for position in range(20000)]
    share = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=0.012)  # more than three standard deviations
    assert np.isfinite(gumbel(0, 0, 1 << 17)).all()


def processed(logits, prompt=(), generated=(), bias=(), allowed=None, **params):
    batch = make_batch(np.random.default_rng(0), BatchShape.for_room(1, 8, 4, bias_pairs=8), (1,), (2,))
    layout, vocab = batch.shape.layout, len(logits)
    penalty = np.zeros((2, vocab), np.int32)
    penalty[1, list(prompt)] |= PROMPT_BIT
    np.add.at(penalty[1], list(generated), 1)
    batch.set_sampling(0, SamplingParams(**params), penalty_row=1)
    batch.slots[batch.word(0, Word.BIAS_START)] = 2
    batch.slots[batch.word(0, Word.BIAS_COUNT)] = len(bias)
    for index, (token, value) in enumerate(bias):
        start = layout.bias_start + 2 * (2 + index)
        batch.slots[start : start + 2] = token, float_bits(value)
    mask = np.zeros((layout.slots, -(-vocab // 32)), np.uint32)
    if allowed is not None:
        batch.slots[batch.word(0, Word.MASK)] = 1
        mask[batch.row_slot[0], 0] = sum(1 << token for token in allowed)
    arrays = {
        "logits": np.array([logits, logits], np.float32), "sample_row": np.array([0, -1], np.int32),
        "row_slot": batch.row_slot, "slots": batch.slots, "penalty": penalty, "mask": mask,
    }  # fmt: skip
    attrs = {"slot_stride": layout.stride, "bias_start": layout.bias_start}
    PRIMITIVES["process_logits"].reference(arrays, attrs)
    np.testing.assert_array_equal(arrays["y"][1], arrays["logits"][1])  # a row of no sequence is copied
    return arrays["y"][0]


def test_repetition_divides_positive_and_multiplies_negative_logits():
    got = processed([2.0, -2.0, 0.5, 0.0], prompt=[0, 1], generated=[2, 3], repetition_penalty=2.0)
    assert got.tolist() == [1.0, -4.0, 0.25, 0.0]


def test_frequency_counts_occurrences_and_works_without_temperature():
    got = processed([2.0, 1.9], generated=[0, 0], frequency_penalty=0.2)
    assert got.tolist() == pytest.approx([1.6, 1.9])
    assert choose(got, 0.0, 0, 1.0, 0.0, gumbel(0, 0, 2)) == 1


def test_presence_and_frequency_ignore_the_prompt():
    got = processed([1.0, 0.9], prompt=[0], presence_penalty=1.0, frequency_penalty=1.0)
    assert got.tolist() == pytest.approx([1.0, 0.9])


def test_repetition_sees_the_prompt():
    assert processed([1.0, 0.9], prompt=[0], repetition_penalty=2.0).tolist() == pytest.approx([0.5, 0.9])


def test_bias_comes_before_mask_and_penalties():
    got = processed(
        [1.0, 1.0, 1.0], generated=[1], bias=[(1, 3.0), (2, -np.inf)], allowed=[1, 2], repetition_penalty=2.0
    )
    assert got.tolist() == [-np.inf, 2.0, -np.inf]


LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0], np.float32)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_p": 0.0}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"min_p": 1.0}, {1, 3}),
        ({"min_p": np.exp(-1.01)}, {1, 2, 3}),
        ({"temperature": 1e-7}, {1, 3}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 2**31 - 1}, {0, 1, 2, 3, 4}),
        ({"top_p": 1.0, "temperature": 3.0}, {0, 1, 2, 3, 4}),
        ({"top_k": 2, "top_p": 0.5}, {1}),
    ],
)
def test_filters_keep_exactly_these_tokens(params, allowed):
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    drawn = {choose(LOGITS, *values.values(), gumbel(3, position, 5)) for position in range(600)}
    assert drawn == allowed


def test_temperature_zero_takes_the_lowest_id_among_equals():
    assert choose(LOGITS, 0.0, 3, 0.1, 0.9, gumbel(0, 0, 5)) == 1


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40), st.floats(1e-7, 50), st.integers(0, 50),
    st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_some_token_always_survives_and_greedy_is_a_special_case(values, temperature, top_k, top_p, min_p, seed):
    logits = np.array(values, np.float32)
    noise = gumbel(seed, 1, len(values))
    token = choose(logits, temperature, top_k, top_p, min_p, noise)
    assert 0 <= token < len(values)
    assert choose(logits, temperature, 1, top_p, min_p, noise) == int(np.argmax(logits))


def step(queries, contexts, **params):
    batch = make_batch(np.random.default_rng(1), BatchShape.for_room(len(queries), 32, 4), queries, contexts)
    for row in range(len(queries)):
        batch.set_sampling(row, SamplingParams(**params))
    return batch


def test_a_sample_depends_on_seed_and_position_and_on_nothing_else():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((1, 300)).astype(np.float32)

    def sampled(queries, contexts, rows):
        batch = step(queries, contexts, temperature=1.0, seed=2**63 + 5)
        arrays = {
            "logits": np.repeat(logits, len(rows), 0), "sample_row": np.array(rows, np.int32),
            "row_slot": batch.row_slot, "cu_q": batch.cu_q, "slots": batch.slots,
        }  # fmt: skip
        PRIMITIVES["sample"].reference(arrays, {"slot_stride": batch.shape.layout.stride})
        return arrays["sampled"].tolist()

    alone = sampled([1], [11], [0])
    assert alone == [choose(logits[0], 1.0, 0, 1.0, 0.0, gumbel(2**63 + 5, 12, 300))]
    assert sampled([4, 2, 12], [8, 3, 0], [2, -1, 0]) == [alone[0], -1, alone[0]]


def test_logprobs_are_those_of_softmax_best_first_and_ties_by_id():
    batch = step([1, 1], [0, 0], logprobs=3)
    batch.set_sampling(1, SamplingParams(logprobs=None))
    logits = np.tile(np.array([0.0, 2.0, 1.0, 2.0], np.float32), (3, 1))
    arrays = {
        "logits": logits, "sampled": np.array([0, 1, -1], np.int32), "sample_row": np.array([0, 1, -1], np.int32),
        "scored": np.array([[-1, 0], [-1, 0], [2, 1]], np.int32), "row_slot": batch.row_slot, "slots": batch.slots,
    }  # fmt: skip
    PRIMITIVES["logprobs"].reference(arrays, {"slot_stride": batch.shape.layout.stride})
    log = np.log(np.exp(logits[0]) / np.exp(logits[0]).sum())
    assert arrays["ids"][0, :5].tolist() == [0, 1, 3, 2, -1]
    np.testing.assert_allclose(arrays["values"][0, :4], log[[0, 1, 3, 2]], rtol=1e-6)
    assert (arrays["ids"][1] == -1).all()
    assert not arrays["values"][1].any()
    assert arrays["ids"][2, :3].tolist() == [2, 1, -1], "the token of a prompt is given, and its slot has no say"
    np.testing.assert_allclose(arrays["values"][2, :2], log[[2, 1]], rtol=1e-6)


def test_advance_moves_every_row_and_remembers_only_what_was_sampled():
    batch = step([3, 1, 0], [5, 7, 9])
    slots = batch.slots.copy()
    arrays = {
        "sampled": np.array([42, -1], np.int32), "sample_row": np.array([1, -1], np.int32), "row_slot": batch.row_slot,
        "cu_q": batch.cu_q, "slots": slots,
    }  # fmt: skip
    PRIMITIVES["advance"].reference(arrays, {"slot_stride": batch.shape.layout.stride})
    assert [slots[batch.word(row, Word.POSITION)] for row in range(3)] == [8, 8, 9]
    assert slots[batch.word(1, Word.LAST_TOKEN)] == 42
    assert np.count_nonzero(slots != batch.slots) == 3
