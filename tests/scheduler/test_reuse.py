"""What a scheduler with a prefix cache computes, and what it does not."""

import pytest
from harness import LIMITS, Harness, request
from msgspec.structs import replace
from scripted import oracle

from atlas_core.ops.step import SlotLayout

CACHED = replace(LIMITS, pages=(16,), max_prefill_tokens=40, prefix_cache=True)


def test_a_second_turn_computes_only_what_is_new():
    harness = Harness(CACHED, ahead=1)
    first = request("a", range(10), max_tokens=8)
    harness.submit(first)
    harness.drain()
    assert harness.device.tokens == 10 + 7  # the last token goes nowhere
    turn = request("b", [*range(10), *harness.out["a"], 40, 41], max_tokens=1)
    harness.submit(turn)
    harness.drain()
    assert harness.out["b"] == oracle(turn, 1, (), 32)
    assert harness.device.tokens == 17 + 20 - 16
    assert (harness.scheduler.tokens_used, harness.scheduler.tokens_kept) == (0, 20)


def test_equal_prompts_that_come_together_are_computed_once():
    harness = Harness(CACHED)
    items = [request(name, range(14), max_tokens=3, temperature=1.0) for name in "abc"]
    for seed, item in enumerate(items):
        harness.submit(item, seed)
    assert [harness.step().token_ids, harness.step().cu_q] == [tuple(range(14)), (0, 1, 3, 5)]
    assert [harness.scheduler.find(name).found for name in "abc"] == [0, 12, 12]
    harness.drain()
    assert [harness.out[item.id] for item in items] == [oracle(item, seed, (), 32) for seed, item in enumerate(items)]


def test_name_spaces_find_their_own():
    harness = Harness(CACHED)
    founds = []
    for name, space in (("1", ""), ("2", "a"), ("3", "b"), ("4", ""), ("5", "a"), ("6", "b")):
        harness.submit(replace(request(name, range(14), max_tokens=1), space=space))
        sequence = harness.scheduler.find(name)
        harness.drain()
        founds.append(sequence.found)
    assert founds == [0, 0, 0, 12, 12, 12]


def test_a_piece_can_be_used_before_its_prompt_is_complete():
    harness = Harness(replace(CACHED, max_prefill_tokens=9, max_mixed_tokens=8))
    harness.submit(request("a", range(20), max_tokens=2))
    harness.step()
    harness.submit(request("b", [*range(8), 30], max_tokens=3))
    harness.step()
    assert harness.scheduler.find("a").computed == 18
    harness.step()
    assert harness.scheduler.find("b").found == 8
    harness.drain()
    assert harness.out["b"] == oracle(request("b", [*range(8), 30], max_tokens=3), 1, (), 32)


def test_who_gave_way_finds_its_pages_again():
    def computed(cached):
        harness = Harness(replace(CACHED, pages=(9,), max_prefill_tokens=40, prefix_cache=cached))
        items = [request(name, range(start, start + 12), max_tokens=18) for name, start in (("a", 0), ("b", 20))]
        for item in items:
            harness.submit(item)
        harness.drain()
        assert harness.scheduler.preemptions
        assert [harness.out[item.id] for item in items] == [oracle(item, 1, (), 32) for item in items]
        return harness.device.tokens

    assert computed(cached=True) < computed(cached=False)


def test_penalties_count_tokens_that_were_found():
    harness = Harness(CACHED)
    items = [request(name, [*range(9), 9], max_tokens=6, repetition_penalty=1.2) for name in "ab"]
    harness.submit(items[0])
    harness.drain()
    harness.submit(items[1])
    assert harness.step().counted == ((0, tuple(range(8)), ()),)
    harness.drain()
    assert harness.out["a"] == harness.out["b"] == oracle(items[0], 1, (), 32)


def test_prompts_whose_every_token_is_scored_find_nothing():
    harness = Harness(CACHED)
    harness.submit(request("a", range(12), max_tokens=1))
    harness.drain()
    harness.submit(request("b", range(12), max_tokens=1, prompt_logprobs=0))
    harness.step()
    assert harness.scheduler.find("b").found == 0
    harness.drain()
    assert harness.scored["b"] == [*range(1, 12)]


def test_a_step_looks_up_no_more_pages_than_one_sequence_may_have():
    harness = Harness(replace(CACHED, pages=(24,)))
    harness.submit(request("long", range(30), max_tokens=1))
    harness.drain()
    for name in "abc":
        harness.submit(request(name, [*range(29), 40], max_tokens=2))
    assert [len(harness.step().row_slot) for _ in range(2)] == [1, 2]
    harness.drain()


HYBRID = replace(
    CACHED,
    layout=SlotLayout(3, (64,), 6),
    pages=(200,),
    max_seq_len=256,
    max_prefill_tokens=100,
    snapshots=4,
    chunk=8,
    least=16,
)


def serve(harness, name, prompt, **sampling):
    """Run a request alone; returns what it found and what it generated."""
    harness.submit(request(name, prompt, **sampling))
    sequence = harness.scheduler.find(name)
    harness.drain()
    assert harness.out[name] == oracle(request(name, prompt, **sampling), 1, (), harness.scheduler.limits.max_seq_len)
    return sequence.found, harness.out[name]


@pytest.mark.parametrize("ahead", [0, 1])
def test_who_is_in_its_own_way_goes_on(ahead):
    """Pages that are kept and had to be computed again, since no state was, are there twice: they are given up for the next page."""
    harness = Harness(replace(HYBRID, layout=SlotLayout(3, (16,), 6), pages=(16,), max_seq_len=64), ahead=ahead)
    prompt = [n % 40 for n in range(40)]
    serve(harness, "a", prompt, max_tokens=2)
    found, _ = serve(harness, "b", [*prompt[:30], *range(20, 30)], max_tokens=24)
    assert found == 0
    assert harness.scheduler.preemptions > 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_turn_goes_on_from_the_state_near_the_end_of_the_one_before(ahead):
    harness = Harness(HYBRID, ahead=ahead)
    prompt = [n % 40 for n in range(60)]
    found, answer = serve(harness, "a", prompt, max_tokens=30)
    assert found == 0
    turn = [*prompt, *answer, 41, 42, 43]
    assert serve(harness, "b", turn, max_tokens=4)[0] == 88  # of 89 tokens with a known successor, in eights
    # A client that leaves the answer out finds the end of the prompt.
    assert serve(harness, "c", [*prompt, 45, 46], max_tokens=4)[0] == 56
    assert serve(harness, "d", prompt, max_tokens=4)[0] == 56
    assert serve(harness, "e", prompt[:57], max_tokens=1)[0] == 56
    assert serve(harness, "f", prompt[:56], max_tokens=1)[0] == 0, (
        "the state stands for all 56, and the last must be computed"
    )


def test_where_prompts_part_is_remembered_the_second_time():
    harness = Harness(HYBRID)
    common = [n % 37 for n in range(50)]
    items = [request(str(i), [*common, *range(i, i + 30)], max_tokens=1) for i in range(3)]
    assert serve(harness, "0", items[0].prompt, max_tokens=1)[0] == 0
    for item in items[1:]:
        harness.submit(item)
    sequences = [harness.scheduler.find(item.id) for item in items[1:]]
    harness.drain()
    assert harness.scheduler.tokens_stateless == 48, "the second's, whose pages were there"
    assert [sequence.found for sequence in sequences] == [0, 48], "the third waits for the state that the second leaves"
    assert [harness.out[item.id] for item in items] == [oracle(item, 1, (), 256) for item in items]


def test_equal_prompts_wait_for_the_state():
    harness = Harness(HYBRID)
    items = [request(name, [n % 40 for n in range(60)], max_tokens=3) for name in "abc"]
    for item in items:
        harness.submit(item)
    assert [harness.step().cu_q for _ in range(2)] == [(0, 56), (0, 4, 8, 12)]
    harness.drain()
    assert harness.device.tokens == 56 + 3 * 4 + 3 * 2


def test_the_snapshots_longest_unused_are_given_away():
    harness = Harness(replace(HYBRID, least=40))
    prompts = [[n, *range(48)] for n in range(6)]
    for n, prompt in enumerate(prompts):
        serve(harness, f"first {n}", prompt, max_tokens=1)
    # One place is the running sequence's: with one slot in use of three, six are for snapshots, and one for what is written.
    assert harness.scheduler._snapshots.kept == 6
    serve(harness, "again", prompts[0], max_tokens=1)
    serve(harness, "new", [7, *range(48)], max_tokens=1)
    kept = [serve(harness, f"then {n}", prompts[n], max_tokens=1)[0] for n in (0, 1)]
    assert kept == [48, 0]


def test_states_go_with_their_pages():
    harness = Harness(replace(HYBRID, pages=(64,)))
    for n in range(6):
        serve(harness, str(n), [n, *(m % 40 for m in range(200))], max_tokens=1)
    nodes = [node for node in harness.scheduler._pages.nodes() if node.snapshot]
    assert 0 < len(nodes) == harness.scheduler._snapshots.kept < 4
