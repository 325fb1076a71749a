import pytest
from harness import LIMITS, Harness, assert_free, pieces_beside_a_decode, request
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted import VOCAB, oracle

from atlas_core.ops.step import SlotLayout, Word
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.vocab.errors import BudgetError, RequestError
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams


@st.composite
def workloads(draw):
    slots = draw(st.integers(1, 4))
    page_tokens = draw(st.sampled_from([1, 2, 4]))
    max_seq_len = draw(st.integers(8, 24))
    blocks = -(-max_seq_len // page_tokens)
    groups = draw(st.integers(1, 2))
    pages = tuple(blocks + draw(st.integers(0, blocks)) for _ in range(groups))
    limits = Limits(
        SlotLayout(slots, (blocks,) * groups, 5),
        page_tokens,
        pages,
        VOCAB,
        max_seq_len,
        draw(st.integers(1, 9)),
        draw(st.integers(0, 2)),
        1000,
        prefix_cache=draw(st.booleans()),
        max_mixed_tokens=draw(st.none() | st.integers(1, 9)),
        mixed_steps=draw(st.sampled_from([(), ((2, 2), (4, 3)), ((4, 5), (8, 7))])),
        even_context=draw(st.none() | st.integers(1, 40)),
    )
    if limits.prefix_cache and draw(st.booleans()):
        sizes = {
            "snapshots": draw(st.integers(1, 6)),
            "chunk": draw(st.integers(1, 4)),
            "least": draw(st.integers(1, 6)),
        }
        limits = replace(limits, **sizes)
    events = []
    common = draw(st.lists(st.integers(0, VOCAB - 1), max_size=max_seq_len - 2))
    for index in range(draw(st.integers(1, 8))):
        prompt = common[: draw(st.integers(0, len(common)))]
        prompt += draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=max_seq_len - 1 - len(prompt)))
        sampling = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.7])),
            max_tokens=draw(st.none() | st.integers(1, 12)),
            min_tokens=draw(st.integers(0, 4)),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])) if limits.penalty_rows else 0.0,
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
            logit_bias=tuple(
                draw(st.lists(st.tuples(st.integers(0, VOCAB - 1), st.sampled_from([-3.0, 2.5])), max_size=2))
            ),
        )
        stop_ids = frozenset(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)))
        seed = draw(st.integers(0, 2**64 - 1))
        events.append((Generate(str(index), tuple(prompt), sampling), seed, stop_ids))
    arrivals = [draw(st.integers(0, 12)) for _ in events]
    aborts = {str(i): draw(st.integers(0, 25)) for i in range(len(events)) if draw(st.integers(0, 3)) == 0}
    return limits, draw(st.integers(0, 2)), list(zip(arrivals, events, strict=True)), aborts


@given(workloads())
def test_every_request_gets_the_text_that_it_gets_alone(workload):
    limits, ahead, arrivals, aborts = workload
    harness = Harness(limits, ahead)
    for now in range(60):
        for arrival, (item, seed, stop_ids) in arrivals:
            if arrival == now:
                harness.submit(item, seed, stop_ids)
        for name, when in aborts.items():
            if when == now and harness.scheduler.find(name):
                harness.abort(name)
        harness.step()
    harness.drain()
    for _, (item, seed, stop_ids) in arrivals:
        want = oracle(item, seed, stop_ids, limits.max_seq_len)
        got = harness.out[item.id]
        if harness.finished[item.id] == "abort":
            assert got == want[: len(got)]
        else:
            assert got == want
            scored = item.prompt[1:] if item.sampling.prompt_logprobs is not None else ()
            assert tuple(harness.scored.get(item.id, ())) == scored
            assert harness.finished[item.id] == ("stop" if want[-1] in stop_ids else "length")
    assert_free(harness.scheduler)


def test_decode_comes_first_and_prompts_are_cut_by_the_budget():
    harness = Harness()
    harness.submit(request("a", [1, 2, 3], max_tokens=9))
    assert harness.step().cu_q == (0, 3)
    harness.submit(request("b", range(7), max_tokens=9))
    harness.submit(request("c", [9, 8, 7, 6], max_tokens=9))
    first, second = harness.step(), harness.step()
    assert (first.token_ids, first.cu_q, first.sample_row, first.logits_rows) == (
        (-1, 0, 1, 2, 3, 4),
        (0, 1, 6),
        (0,),
        (0,),
    )
    assert (second.token_ids, second.cu_q) == ((-1, 5, 6, 9, 8, 7), (0, 1, 3, 6))
    assert (second.sample_row, second.logits_rows) == ((0, 1), (0, 2))
    third = harness.step()
    assert (third.token_ids, third.max_query) == ((-1, -1, 6), 1)
    harness.drain()
    assert_free(harness.scheduler)


def test_a_step_ahead_never_asks_for_more_than_the_limit():
    harness = Harness(ahead=1)
    harness.submit(request("a", [1], max_tokens=3))
    harness.drain()
    assert harness.device.steps == 3
    assert harness.device.tokens == 3


def test_surplus_of_a_step_ahead_is_dropped_and_the_slot_freed_afterwards():
    item = request("a", [1, 2], max_tokens=20)
    tokens = oracle(item, 1, (), 32)
    stop = tokens[3]
    assert stop not in tokens[:3]
    harness = Harness(ahead=1)
    harness.submit(item, stop_ids=[stop])
    while "a" not in harness.finished:
        harness.step()
    assert harness.flight
    assert not harness.scheduler.idle
    assert harness.scheduler.tokens_used == 8
    harness.step()
    assert harness.out["a"] == tokens[:4]
    assert_free(harness.scheduler)


def test_the_youngest_gives_way_and_goes_on_before_those_behind_it():
    limits = replace(LIMITS, pages=(8,), max_prefill_tokens=40)
    harness = Harness(limits)
    items = [request(name, range(start, start + 10), max_tokens=20) for name, start in (("a", 0), ("b", 10), ("c", 20))]
    for item in items:
        harness.submit(item)
    harness.step()
    assert (harness.scheduler.running, harness.scheduler.waiting) == (2, 1)
    while not harness.scheduler.preemptions:
        harness.step()
    assert [s.id for s in harness.scheduler._waiting] == ["b", "c"]
    harness.drain()
    assert [harness.out[item.id] for item in items] == [oracle(item, 1, (), 32) for item in items]
    assert_free(harness.scheduler)


def test_a_prompt_beside_decodes_is_read_in_smaller_pieces():
    limits = replace(LIMITS, max_prefill_tokens=12, max_mixed_tokens=5)
    # One token of the step is the other's.
    assert pieces_beside_a_decode(limits, 10)[:6] == [4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("mixed", "decodes", "left"), [(None, 3, 12), (8, 0, 12), (8, 3, 5), (8, 7, 2), (8, 20, 2), (3, 3, 1), (40, 3, 12)]
)
def test_decodes_leave_prompts_the_rest_of_a_mixed_step_and_never_less_than_a_quarter(mixed, decodes, left):
    assert replace(LIMITS, max_prefill_tokens=12, max_mixed_tokens=mixed).prompt_tokens(decodes) == left


def test_a_prompt_alone_is_read_in_the_largest_pieces():
    harness = Harness(replace(LIMITS, max_prefill_tokens=12, max_mixed_tokens=5))
    harness.submit(request("b", range(24), max_tokens=2))
    harness.step()
    assert harness.scheduler.find("b").computed == 12


def test_abort_while_waiting_in_prefill_and_in_flight():
    harness = Harness(ahead=1)
    for name in "abcd":
        harness.submit(request(name, range(8), max_tokens=20))
    harness.abort("d")
    harness.step()
    harness.abort("a")
    assert harness.scheduler._leaving
    harness.step()
    harness.step()
    harness.abort("b")
    harness.drain()
    assert harness.out["c"] == oracle(request("c", range(8), max_tokens=20), 1, (), 32)
    assert harness.out["a"] == harness.out["d"] == []
    assert_free(harness.scheduler)


def test_every_slot_has_a_recurrent_state_of_its_own():
    harness = Harness()
    for name in "ab":
        harness.submit(request(name, [5, 6], max_tokens=1))
    updates, layout = dict(harness.step().updates), LIMITS.layout
    for field in (Word.STATE_IN, Word.STATE_OUT):
        assert [updates[layout.word(slot, field)] for slot in (0, 1)] == [0, 1]


def test_a_filled_slot_holds_every_field_of_the_new_sequence():
    harness = Harness()
    sampling = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": -1.0,
        "frequency_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": ((3, -100.0),),
        "min_tokens": 2, "logprobs": 4, "max_tokens": 1,
    }  # fmt: skip
    harness.submit(request("a", [5, 6], **sampling), seed=0xFFFFFFFF_00000002, stop_ids=[8, 9])
    plan = harness.step()
    bits = {
        0.5: 0x3F000000,
        0.25: 0x3E800000,
        0.125: 0x3E000000,
        -1.0: 0xBF800000 - 2**32,
        2.0: 0x40000000,
        1.5: 0x3FC00000,
    }
    want = {
        Word.LAST_TOKEN: 0, Word.POSITION: 0, Word.PROMPT_LENGTH: 2, Word.PENALTY_ROW: 0, Word.TEMPERATURE: bits[0.5],
        Word.TOP_P: bits[0.25], Word.TOP_K: 7, Word.MIN_P: bits[0.125], Word.PRESENCE: bits[-1.0],
        Word.FREQUENCY: bits[2.0], Word.REPETITION: bits[1.5], Word.SEED_LOW: 2, Word.SEED_HIGH: -1,
        Word.BIAS_START: 0, Word.BIAS_COUNT: 3, Word.LOGPROBS: 4, Word.MASK: 0,
        Word.STATE_IN: 0, Word.STATE_OUT: 0,
    }  # fmt: skip
    start = LIMITS.layout.bias_start
    minus_inf = 0xFF800000 - 2**32
    pairs = {
        start: 3,
        start + 1: 0xC2C80000 - 2**32,
        start + 2: 8,
        start + 3: minus_inf,
        start + 4: 9,
        start + 5: minus_inf,
    }
    table = {LIMITS.layout.block(0, 0, 0): 0}
    assert set(want) == set(Word)
    assert dict(plan.updates) == {**want, **pairs, **table}
    assert plan.clear_penalty == (0,)
    assert plan.logprobs


def test_pooled_resources_make_a_request_wait_and_not_fail():
    harness = Harness()
    harness.submit(request("a", [1], presence_penalty=1.0, max_tokens=4))
    harness.submit(request("b", [2], presence_penalty=1.0, max_tokens=4))
    harness.submit(request("c", [3], max_tokens=4))
    harness.step()
    assert (harness.scheduler.running, harness.scheduler.waiting) == (1, 2)
    harness.drain()
    assert [len(harness.out[name]) for name in "abc"] == [4, 4, 4]
    assert_free(harness.scheduler)


@pytest.mark.parametrize(
    ("prompt", "sampling", "field", "code"),
    [
        ([], {}, "prompt", None),
        (range(32), {}, "prompt", "context_length_exceeded"),
        ([VOCAB], {}, "prompt", "invalid_token"),
        ([-1], {}, "prompt", "invalid_token"),
        ([1], {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias", "invalid_token"),
        ([1], {"logit_bias": ((1, 1e300),)}, "logit_bias", None),
        ([1], {"logit_bias": tuple((i, 1.0) for i in range(7))}, "logit_bias", None),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids", "invalid_token"),
        ([1], {"temperature": 1e39}, "temperature", None),
        ([1], {"max_tokens": 0}, "max_tokens", None),
        ([1], {"logprobs": 21}, "top_logprobs", None),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt, sampling, field, code):
    scheduler = Scheduler(LIMITS)
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request("a", prompt, **sampling), seed=1, stop_ids=())
    assert (caught.value.field, caught.value.code) == (field, code)
    assert_free(scheduler)


def test_penalties_without_memory_for_counts_are_refused():
    scheduler = Scheduler(replace(LIMITS, penalty_rows=0))
    with pytest.raises(RequestError, match="penalties are off"):
        scheduler.submit(request("a", [1], repetition_penalty=1.1), seed=1, stop_ids=())


def test_the_line_is_bounded_beyond_the_free_slots():
    scheduler = Scheduler(replace(LIMITS, layout=SlotLayout(2, (8,), 6), max_waiting=2, retry_after=3.0))
    for name in "abcd":
        scheduler.submit(request(name, [1]), seed=1, stop_ids=())
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request("e", [1]), seed=1, stop_ids=())
    assert (caught.value.kind, caught.value.code, caught.value.retry_after) == ("overloaded", "queue_full", 3.0)
    scheduler.schedule()
    assert (scheduler.running, scheduler.waiting) == (2, 2)
    with pytest.raises(RequestError, match="waiting already"):
        scheduler.submit(request("e", [1]), seed=1, stop_ids=())


def test_an_id_is_unique_while_it_lives():
    harness = Harness()
    harness.submit(request("a", [1], max_tokens=1))
    with pytest.raises(RequestError, match="already running"):
        harness.scheduler.submit(request("a", [1]), seed=1, stop_ids=())
    harness.drain()
    harness.submit(request("a", [1], max_tokens=1))


def test_a_cache_that_cannot_hold_one_sequence_is_an_error_at_start():
    with pytest.raises(BudgetError, match="lower --max-seq-len"):
        replace(LIMITS, pages=(7,))
