"""What a step takes of prompts: never more than it may, at equal cost behind every context, in whole tiles."""

from dataclasses import replace

import pytest
from harness import LIMITS, Harness, request
from hypothesis import given
from hypothesis import strategies as st
from scripted import oracle

from atlas_core.scheduler.allowance import Allowance

LLAMA = replace(LIMITS, max_prefill_tokens=8192, max_mixed_tokens=496, mixed_tile=128, even_context=26_630)


@st.composite
def cases(draw):
    limits = replace(
        LIMITS,
        max_prefill_tokens=draw(st.integers(1, 2000)),
        max_mixed_tokens=draw(st.none() | st.integers(1, 1000)),
        mixed_tile=draw(st.sampled_from([1, 64, 128])),
        even_context=draw(st.none() | st.integers(1, 100_000)),
    )
    prompts = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 200_000)), min_size=1, max_size=6)
    return limits, draw(st.integers(0, 300)), draw(prompts)


@given(cases())
def test_a_step_takes_no_more_than_it_may_and_ends_with_the_prompt_that_is_cut(case):
    limits, decodes, prompts = case
    allowance, most = Allowance(limits, decodes), limits.prompt_tokens(decodes)
    even = limits.even_context if decodes and limits.max_mixed_tokens else None
    taken, cost, dearest, cut = 0, 0, 0, False
    for wanted, context in prompts:
        if not allowance:
            assert cut or taken == most or cost >= most * even
            break
        assert not cut
        count = allowance.take(wanted, context)
        assert 1 <= count <= wanted
        cut = count < wanted
        taken += count
        cost += count * ((even or 0) + context)
        dearest = max(dearest, (even or 0) + context)
    assert taken <= most
    if even:
        assert cost <= most * even + dearest  # a token is had by everybody


@given(cases())
def test_a_cut_step_fills_tiles_unless_that_would_cost_half_of_the_prompt(case):
    limits, decodes, [(_, context), *_] = case
    if not decodes or limits.max_mixed_tokens is None:
        return
    endless = 10**6
    whole = Allowance(replace(limits, mixed_tile=1), decodes).take(endless, context)
    count = Allowance(limits, decodes).take(endless, context)
    assert whole // 2 <= count <= whole
    assert count == whole or (decodes + count) % limits.mixed_tile == 0
    assert whole - count < limits.mixed_tile


@given(cases(), st.integers(0, 100_000))
def test_the_longer_the_context_the_fewer_tokens_and_alone_it_does_not_matter(case, further):
    limits, decodes, [(wanted, context), *_] = case
    flat = replace(limits, mixed_tile=1)
    near, far = (Allowance(flat, decodes).take(wanted, c) for c in (context, context + further))
    assert far <= near
    assert Allowance(limits, 0).take(wanted, context) == min(wanted, limits.max_prefill_tokens)


@pytest.mark.parametrize(
    ("decodes", "wanted", "context", "taken"),
    [
        (32, 8000, 0, 352),
        (32, 8000, 8000, 352),  # 464 tokens cost as much at the beginning as 357 do here
        (32, 8000, 9000, 224),
        (32, 8000, 60000, 96),
        (32, 460, 0, 460),  # what ends in this step is not cut
        (32, 40, 60000, 40),
        (480, 8000, 0, 124),  # a quarter, which no tile fits in
        (0, 8000, 8000, 8000),
    ],
)
def test_pieces_of_a_prompt_of_an_8b_model(decodes, wanted, context, taken):
    assert Allowance(LLAMA, decodes).take(wanted, context) == taken


def test_pieces_get_shorter_along_a_prompt_and_its_text_is_the_same():
    limits = replace(LIMITS, max_prefill_tokens=12, max_mixed_tokens=9, even_context=8)
    harness = Harness(limits)
    first, second = request("a", range(3), max_tokens=20), request("b", range(24), max_tokens=2)
    harness.submit(first)
    harness.step()
    harness.submit(second)
    lengths = []
    while not harness.out["b"]:
        before = harness.scheduler.find("b").computed
        harness.step()
        lengths.append(harness.scheduler.find("b").computed - before)
    # Of 8 tokens: 8 * 8 / (8 + context).
    assert lengths[:5] == [8, 4, 3, 2, 2]
    harness.drain()
    assert [harness.out[item.id] for item in (first, second)] == [oracle(item, 1, (), 32) for item in (first, second)]


@pytest.mark.parametrize(
    "wrong", [{"mixed_tile": 0}, {"even_context": 0}, {"max_mixed_tokens": 0}, {"max_waiting": -1}]
)
def test_sizes_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="at least"):
        replace(LIMITS, **wrong)
