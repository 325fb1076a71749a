"""What a step takes of prompts: never more than it may, at equal cost behind every context, in whole tiles."""

from fractions import Fraction

import pytest
from harness import LIMITS, pieces_beside_a_decode
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atlas_core.scheduler.allowance import Allowance

STEPS = ((128, 200), (256, 320), (384, 384), (512, 500), (640, 717))
LLAMA = replace(LIMITS, max_prefill_tokens=8192, max_mixed_tokens=496, mixed_steps=STEPS, even_context=26_630)
ENDLESS = 10**6


@st.composite
def cases(draw):
    sizes, costs = (sorted(draw(st.sets(st.integers(1, 1200), min_size=4, max_size=4))) for _ in range(2))
    limits = replace(
        LIMITS,
        max_prefill_tokens=draw(st.integers(1, 2000)),
        max_mixed_tokens=draw(st.none() | st.integers(1, 1000)),
        mixed_steps=draw(st.sampled_from([(), STEPS, tuple(zip(sizes, costs, strict=True))])),
        even_context=draw(st.none() | st.integers(1, 100_000)),
    )
    prompts = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 200_000)), min_size=1, max_size=6)
    return limits, draw(st.integers(0, 300)), draw(prompts)


def products(limits, tokens):
    """What so many tokens cost without a context, read off the table."""
    for size, cost in limits.mixed_steps:
        if tokens <= size:
            return cost
    size, cost = limits.mixed_steps[-1] if limits.mixed_steps else (0, 0)
    return cost + tokens - size


def price(limits, decodes, taken):
    """What a step costs that takes (tokens, context) of prompts, as a fraction of what it may."""
    attention = sum(Fraction(count * context, limits.even_context or 1) for count, context in taken)
    whole = products(limits, decodes + sum(count for count, _ in taken))
    attended = attention if limits.even_context else 0
    most = decodes + limits.prompt_tokens(decodes)
    if most > limits.max_mixed_tokens:
        most = max(most, products(limits, most))
    return (whole + attended) / Fraction(most)


@given(cases())
def test_a_step_takes_and_costs_no_more_than_it_may_and_ends_with_the_prompt_that_is_cut(case):
    limits, decodes, prompts = case
    allowance, most = Allowance(limits, decodes), limits.prompt_tokens(decodes)
    mixed = decodes and limits.max_mixed_tokens is not None
    taken, cut = [], False
    for wanted, context in prompts:
        if not allowance:
            break
        assert not cut
        count = allowance.take(wanted, context)
        assert 1 <= count <= wanted
        cut = count < wanted
        taken.append((count, context))
    assert sum(count for count, _ in taken) <= most
    if not mixed:
        assert cut or len(taken) == len(prompts) or sum(count for count, _ in taken) == most
    elif price(limits, decodes, taken) > 1:
        # Somebody gets on where not even the smallest size is within the budget, and a token is had by everybody.
        *before, (count, context) = taken
        smallest = next((size for size, _ in limits.mixed_steps if size > decodes), ENDLESS)
        even = limits.even_context or 1
        each = even + (context if limits.even_context else 0)
        forced = not before and decodes + count <= smallest and count * each <= max(most * even, each)
        assert forced or (count == 1 and (not before or price(limits, decodes, [*before, (1, 0)]) <= 1))


@given(cases(), st.integers(0, 300), st.integers(0, 5000))
def test_a_cut_prompt_fills_the_size_that_has_the_most_tokens_for_its_products(case, before, behind):
    limits, decodes, [(_, context), *_] = case
    if not decodes or limits.max_mixed_tokens is None:
        return
    allowance, taken = Allowance(limits, decodes), []
    if before:
        taken = [(before, behind)]
        if allowance.take(before, behind) < before or not allowance:
            return
    count = allowance.take(ENDLESS, context)
    left = limits.prompt_tokens(decodes) - sum(count for count, _ in taken)
    planned = limits.prompt_tokens(decodes) - left + decodes

    def worth(n):
        return Fraction(planned + n - decodes, products(limits, planned + n))

    sizes = {min(left, size - planned) for size, _ in limits.mixed_steps if size > planned}
    last = max((size for size, _ in limits.mixed_steps), default=0)
    beyond = [
        n for n in range(max(1, last + 1 - planned), left + 1) if price(limits, decodes, [*taken, (n, context)]) <= 1
    ]
    whole = [n for n in {*sizes, *beyond[-1:]} if price(limits, decodes, [*taken, (n, context)]) <= 1]
    if whole:
        assert count in whole
        assert worth(count) == max(map(worth, whole))
    else:
        assert count <= min(sizes, default=left)


@given(cases(), st.integers(0, 100_000))
def test_the_longer_the_context_the_fewer_tokens_and_alone_it_does_not_matter(case, further):
    limits, decodes, [(wanted, context), *_] = case
    near, far = (Allowance(limits, decodes).take(ENDLESS, c) for c in (context, context + further))
    assert far <= near
    assert Allowance(limits, 0).take(wanted, context) == min(wanted, limits.max_prefill_tokens)


@pytest.mark.parametrize(
    ("decodes", "wanted", "context", "taken"),
    [
        (32, 8000, 0, 352),
        (32, 8000, 8000, 352),  # 500 tokens without a context cost as much as 384 of which 352 have this one
        (32, 8000, 9000, 224),
        (32, 8000, 60000, 96),
        (32, 460, 0, 352),  # four tiles are beyond the budget
        (32, 40, 60000, 40),
        (480, 8000, 0, 124),  # a quarter, in a size that is else too dear
        (0, 8000, 8000, 8000),
    ],
)
def test_pieces_of_a_prompt_of_an_8b_model(decodes, wanted, context, taken):
    assert Allowance(LLAMA, decodes).take(wanted, context) == taken


def test_steps_of_a_long_prompt_have_a_size_less_where_they_would_take_too_long():
    limits, context, counts = replace(LLAMA, max_mixed_tokens=456), 0, []
    while context < 8000:
        counts.append(Allowance(limits, 32).take(8000 - context, context))
        assert price(limits, 32, [(counts[-1], context)]) <= 1
        context += counts[-1]
    # 384 and 352 · context / 26,630 are 456 at 5,447.
    assert counts == [352] * 16 + [224] * 10 + [128]


def test_pieces_get_shorter_along_a_prompt_and_its_text_is_the_same():
    limits = replace(LIMITS, max_prefill_tokens=12, max_mixed_tokens=9, even_context=8)
    # Of 8 tokens: 8 * 8 / (8 + context).
    assert pieces_beside_a_decode(limits, 3)[:5] == [8, 4, 3, 2, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mixed_steps": ((0, 1),)}, {"mixed_steps": ((8, 8), (8, 9))}, {"mixed_steps": ((8, 8), (9, 8))}, {"even_context": 0},
        {"max_mixed_tokens": 0}, {"max_waiting": -1},
    ],
)  # fmt: skip
def test_sizes_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=r"at least|more than"):
        replace(LIMITS, **wrong)


def test_the_last_token_of_a_step_is_given():
    allowance = Allowance(replace(LIMITS, max_prefill_tokens=1983, max_mixed_tokens=None), 0)
    assert [allowance.take(wanted, 0) for wanted in (1, 1, 1, 1979)] == [1, 1, 1, 1979]
    assert allowance
    assert allowance.take(5, 0) == 1
    assert not allowance
