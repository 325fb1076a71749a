"""From logits to a token: penalties, filters at their edges, seeds, log-probabilities, and the step's bookkeeping."""

import numpy as np
import pytest

from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.references import PROMPT_BIT
from atlas_core.ops.step import SlotLayout, Word

LAYOUT = SlotLayout(slots=6, table_blocks=(2,), bias_pairs=8)
STRIDE = {"slot_stride": LAYOUT.stride}
LIVE = dict.fromkeys(("logits", "sample_row", "sampled", "y", "values", "ids", "scored"), "R")
LIVE |= {"row_slot": "S", "cu_q": "S+1"}
NEUTRAL = {
    Word.PENALTY_ROW: -1, Word.TOP_P: 1.0, Word.REPETITION: 1.0, Word.LOGPROBS: -1, Word.TEMPERATURE: 1.0,
    Word.MIN_P: 0.0, Word.PRESENCE: 0.0, Word.FREQUENCY: 0.0,
}  # fmt: skip


def slots_with(*fields):
    """The array of slots; row i lives in slot i + 1 with ``fields[i]`` over neutral values."""
    words = np.zeros(LAYOUT.words, np.int32)
    for row, given in enumerate(fields):
        for field, value in (NEUTRAL | given).items():
            bits = np.float32(value).view(np.int32) if isinstance(value, float) else np.array(value).astype(np.int32)
            words[LAYOUT.word(row + 1, field)] = bits
    return words


def inputs(logits, slots, sample_row=None):
    rows = len(logits)
    sample_row = np.arange(rows, dtype=np.int32) if sample_row is None else sample_row
    return {
        "logits": logits, "sample_row": sample_row, "row_slot": np.arange(1, rows + 1, dtype=np.int32),
        "cu_q": np.arange(rows + 1, dtype=np.int32), "slots": slots,
    }  # fmt: skip


def sample(bench, make_step, logits, *fields):
    arrays = inputs(logits, slots_with(*fields))
    step = make_step(tokens=len(logits), sequences=len(logits), rows=len(logits), live=LIVE)
    got = bench.run("sample", arrays, STRIDE, step, {"sampled": ((len(logits),), np.int32)})["sampled"]
    want = dict(arrays)
    PRIMITIVES["sample"].reference(want, STRIDE)
    np.testing.assert_array_equal(got, want["sampled"])
    return got


def one(bench, make_step, values, **fields):
    return int(
        sample(bench, make_step, np.array([values], np.float32), {Word[k.upper()]: v for k, v in fields.items()})[0]
    )


@pytest.mark.parametrize("vocabulary", [3, 97, 1000, 49152])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 40, "temperature": 2.0},
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 3.0},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "temperature": 1.3},
    ],
)
def test_sample_agrees_with_the_reference(bench, make_step, vocabulary, fields):
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((4, vocabulary)) * 4).astype(np.float32)
    given = [
        {Word[k.upper()]: v for k, v in fields.items()}
        | {Word.SEED_LOW: seed, Word.SEED_HIGH: -seed, Word.POSITION: 7 * seed}
        for seed in range(1, 5)
    ]
    sample(bench, make_step, logits, *given)


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-7}, {"temperature": 0.0}],
)
def test_what_acts_as_greedy(bench, make_step, fields):
    assert one(bench, make_step, [0.5, 2.0, 1.9, -3.0], **fields) == 1


@pytest.mark.parametrize("top_k", [0, -1, 5, 6, 2147483647])
def test_top_k_that_is_off(bench, make_step, top_k):
    logits = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert one(bench, make_step, logits, top_k=top_k, seed_low=9) == one(bench, make_step, logits, seed_low=9)


def test_ties_go_to_the_lower_id(bench, make_step):
    assert one(bench, make_step, [1.0, 3.0, 3.0, 3.0], temperature=0.0) == 1
    assert one(bench, make_step, [1.0, 3.0, 3.0, 3.0], top_k=1) == 1


def test_a_flat_distribution_under_top_p(bench, make_step):
    flat = np.zeros((1, 2000), np.float32)
    chosen = {int(sample(bench, make_step, flat, {Word.TOP_P: 0.25, Word.SEED_LOW: seed})[0]) for seed in range(30)}
    assert len(chosen) > 20
    assert max(chosen) < 500


def test_masked_tokens_are_never_chosen(bench, make_step):
    logits = np.full((1, 300), -np.inf, np.float32)
    logits[0, [7, 250]] = 0
    chosen = {int(sample(bench, make_step, logits, {Word.SEED_LOW: seed})[0]) for seed in range(20)}
    assert chosen == {7, 250}


@pytest.mark.parametrize("fields", [{}, {Word.TOP_P: 0.9}, {Word.TOP_K: 5}, {Word.MIN_P: 0.1}])
def test_a_row_without_any_allowed_token_still_names_a_token(bench, make_step, fields):
    arrays = inputs(np.full((1, 100), -np.inf, np.float32), slots_with(fields))
    step = make_step(tokens=1, sequences=1, rows=1, live=LIVE)
    assert bench.run("sample", arrays, STRIDE, step, {"sampled": ((1,), np.int32)})["sampled"][0] == 0


def test_a_row_samples_the_same_alone_and_in_a_batch(bench, make_step):
    logits = np.random.default_rng(3).standard_normal((4, 500)).astype(np.float32)
    seeded = {Word.SEED_LOW: 1234, Word.TEMPERATURE: 0.9, Word.POSITION: 11}
    batch = sample(bench, make_step, logits, {Word.TEMPERATURE: 0.0}, {Word.TOP_K: 3}, seeded, {})
    assert sample(bench, make_step, logits[2:3], seeded)[0] == batch[2]


def test_samples_follow_the_distribution(bench, make_step):
    values = np.array([0.0, 1.0, 2.0], np.float32)
    draws = [one(bench, make_step, values, seed_low=seed, position=3 * seed) for seed in range(400)]
    want = np.exp(values) / np.exp(values).sum()
    assert np.abs(np.bincount(draws, minlength=3) / 400 - want).max() < 0.08


def test_the_largest_draw_is_not_infinite_noise(bench, make_step):
    # Found by search: at position 0 seed 99 draws 2^24 - 1 for token 35874, which rounds to 1 in float32.
    logits = np.zeros((1, 49152), np.float32)
    logits[0, 35874] = -20
    assert sample(bench, make_step, logits, {Word.SEED_LOW: 99, Word.POSITION: -1})[0] != 35874
    logits[0, 35874] = 0
    assert sample(bench, make_step, logits, {Word.SEED_LOW: 99, Word.POSITION: -1})[0] == 35874


def test_rows_of_no_sequence_give_minus_one(bench, make_step):
    arrays = inputs(np.zeros((2, 9), np.float32), slots_with({}, {}), np.array([-1, 0], np.int32))
    step = make_step(tokens=2, sequences=2, rows=2, live=LIVE)
    got = bench.run("sample", arrays, STRIDE, step, {"sampled": ((2,), np.int32)})["sampled"]
    assert got[0] == -1
    assert got[1] >= 0


def process(bench, make_step, logits, penalty, slots, mask=None, sample_row=None):
    rows, vocabulary = logits.shape
    mask = np.zeros((LAYOUT.slots, -(-vocabulary // 32)), np.uint32) if mask is None else mask
    arrays = inputs(logits, slots, sample_row) | {"penalty": penalty, "mask": mask}
    attrs = STRIDE | {"bias_start": LAYOUT.bias_start}
    step = make_step(tokens=rows, sequences=rows, rows=rows, live=LIVE)
    got = bench.run("process_logits", arrays, attrs, step, {"y": (logits.shape, np.float32)})["y"]
    want = dict(arrays)
    PRIMITIVES["process_logits"].reference(want, attrs)
    np.testing.assert_allclose(got, want["y"], rtol=1e-6, atol=1e-6)
    return got


@pytest.mark.parametrize(
    ("logits", "counts", "fields", "want"),
    [
        ([2.0, -2.0, 0.5, 0.0], [1, 1, 1, 1], {Word.REPETITION: 2.0}, [1.0, -4.0, 0.25, 0.0]),
        ([2.0, 1.9], [2, 0], {Word.FREQUENCY: 0.2}, [1.6, 1.9]),
        ([1.0, 0.9], [PROMPT_BIT, 0], {Word.PRESENCE: 1.0}, [1.0, 0.9]),
        ([1.0, 0.9], [PROMPT_BIT, 0], {Word.REPETITION: 2.0}, [0.5, 0.9]),
        ([1.0, 0.9], [PROMPT_BIT + 1, 0], {Word.PRESENCE: 1.0}, [0.0, 0.9]),
    ],
)
def test_penalties(bench, make_step, logits, counts, fields, want):
    slots = slots_with(fields | {Word.PENALTY_ROW: 1})
    penalty = np.array([[9] * len(counts), counts], np.int32)
    got = process(bench, make_step, np.array([logits], np.float32), penalty, slots)
    np.testing.assert_allclose(got[0], np.array(want, np.float32), rtol=1e-6)


def test_bias_mask_and_penalties_together_over_a_whole_vocabulary(bench, make_step):
    rng = np.random.default_rng(4)
    vocabulary = 49152
    logits = rng.standard_normal((3, vocabulary)).astype(np.float32)
    slots = slots_with(
        {
            Word.BIAS_START: 2,
            Word.BIAS_COUNT: 3,
            Word.MASK: 1,
            Word.PENALTY_ROW: 0,
            Word.REPETITION: 1.3,
            Word.FREQUENCY: 0.4,
        },
        {},
        {Word.MASK: 1},
    )
    pairs = slots[LAYOUT.bias_start :].reshape(-1, 2)
    pairs[2:5, 0] = 0, 30000, vocabulary - 1
    pairs[2:5, 1] = np.array([5.0, -np.inf, 2.5], np.float32).view(np.int32)
    penalty = rng.integers(0, 4, (1, vocabulary)).astype(np.int32) * rng.integers(0, 2, vocabulary).astype(np.int32)
    mask = rng.integers(0, 2**32, (LAYOUT.slots, vocabulary // 32), dtype=np.uint32)
    got = process(bench, make_step, logits, penalty, slots, mask, np.array([0, -1, 2], np.int32))
    np.testing.assert_array_equal(got[1], logits[1])
    assert 0.4 < np.isinf(got[2]).mean() < 0.6


@pytest.mark.parametrize("vocabulary", [5, 333, 49152])
def test_logprobs(bench, make_step, vocabulary):
    logits = (np.random.default_rng(5).standard_normal((4, vocabulary)) * 3).astype(np.float32)
    logits[0, 1:3] = logits[0].max() + 1
    wanted = [{Word.LOGPROBS: 3}, {}, {Word.LOGPROBS: 0}, {Word.LOGPROBS: min(20, vocabulary)}]
    arrays = inputs(logits, slots_with(*wanted)) | {
        "sampled": np.array([1, 0, 2, vocabulary - 1], np.int32),
        "scored": np.array([[-1, 0], [vocabulary - 2, 4], [-1, 0], [0, 0]], np.int32),
    }
    step = make_step(tokens=4, sequences=4, rows=4, live=LIVE)
    outputs = {"values": ((4, 21), np.float32), "ids": ((4, 21), np.int32)}
    got = bench.run("logprobs", arrays, STRIDE, step, outputs)
    want = dict(arrays)
    PRIMITIVES["logprobs"].reference(want, STRIDE)
    np.testing.assert_array_equal(got["ids"], want["ids"])
    np.testing.assert_allclose(got["values"], want["values"], rtol=1e-5, atol=1e-4)
    assert got["ids"][0, 1:4].tolist()[:2] == [1, 2]


def test_step_begin_applies_updates_and_counts_tokens(bench, make_step):
    slots = slots_with(
        {Word.POSITION: 4, Word.LAST_TOKEN: 8, Word.PROMPT_LENGTH: 4, Word.PENALTY_ROW: 1}, {Word.PROMPT_LENGTH: 3}
    )
    updates = np.array(
        [[LAYOUT.word(2, Word.POSITION), 1], [LAYOUT.word(2, Word.POSITION), 2], [LAYOUT.word(2, Word.PENALTY_ROW), 0]],
        np.int32,
    )
    arrays = {
        "updates": updates, "token_ids": np.array([-1, 5, 5, 9], np.int32), "cu_q": np.array([0, 1, 4], np.int32),
        "row_slot": np.array([1, 2], np.int32), "slots": slots, "penalty": np.zeros((2, 10), np.int32),
    }  # fmt: skip
    live = {
        "updates": "U",
        "token_ids": "T",
        "tokens": "T",
        "positions": "T",
        "token_row": "T",
        "cu_q": "S+1",
        "row_slot": "S",
    }
    step = make_step(tokens=4, sequences=2, updates=3, live=live)
    outputs = dict.fromkeys(("tokens", "positions", "token_row"), ((4,), np.int32))
    got = bench.run("step_begin", arrays, STRIDE, step, outputs)
    want = {name: value.copy() for name, value in arrays.items()}
    PRIMITIVES["step_begin"].reference(want, STRIDE)
    for name in ("tokens", "positions", "token_row", "slots", "penalty"):
        np.testing.assert_array_equal(got[name], want[name], name)
    assert got["tokens"].tolist() == [8, 5, 5, 9]
    assert got["positions"].tolist() == [4, 2, 3, 4]
    assert got["penalty"][0].tolist() == [0, 0, 0, 0, 0, PROMPT_BIT + 1, 0, 0, 0, 1]


def test_advance(bench, make_step):
    arrays = {
        "sampled": np.array([44, 55], np.int32), "sample_row": np.array([-1, 1], np.int32),
        "row_slot": np.array([3, 1], np.int32), "cu_q": np.array([0, 5, 6], np.int32),
        "slots": slots_with({Word.POSITION: 9}, {}, {Word.POSITION: 2, Word.LAST_TOKEN: 7}),
    }  # fmt: skip
    step = make_step(tokens=6, sequences=2, rows=2, live=LIVE)
    got = bench.run("advance", arrays, STRIDE, step, {})["slots"]
    want = {name: value.copy() for name, value in arrays.items()}
    PRIMITIVES["advance"].reference(want, STRIDE)
    np.testing.assert_array_equal(got, want["slots"])
    assert [got[LAYOUT.word(slot, Word.POSITION)] for slot in (1, 3)] == [10, 7]
    assert [got[LAYOUT.word(slot, Word.LAST_TOKEN)] for slot in (1, 3)] == [55, 7]
