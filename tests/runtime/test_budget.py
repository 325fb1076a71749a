"""The memory plan: plain numbers in, a table or a refusal out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.runtime.budget import GIB, KVNeed, Readings, Term, plan_budget
from atlas_core.vocab.errors import BudgetError

UNIFIED = Readings(total=121 * GIB, device_free=30 * GIB, host_available=100 * GIB, unified=True)
TERMS = (Term("weights", 60 * GIB, "choose a smaller model"), Term("arena", 2 * GIB, "lower --max-prefill-tokens"))
KV = KVNeed(page_bytes=1 << 20, page_tokens=16, max_seq_len=8192)


def test_the_page_cache_of_unified_memory_does_not_count_as_used():
    budget = plan_budget(UNIFIED, 0.8, TERMS, KV)
    assert budget.limit == int(121 * GIB * 0.8)
    assert budget.pages == (budget.limit - 62 * GIB) // KV.page_bytes
    assert budget.tokens == budget.pages * 16
    assert (budget.max_seq_len, budget.notes) == (8192, ())
    assert sum(term.nbytes for term in budget.terms) <= budget.limit


def test_the_limit_must_be_available():
    with pytest.raises(BudgetError) as caught:
        plan_budget(Readings(121 * GIB, 30 * GIB, 60 * GIB, unified=True), 0.8, TERMS, KV)
    assert caught.value.what == "the memory limit of 96.80 GiB is not available: 60.00 GiB is"
    for line in ("weights", "arena", "KV pages", "limit", "available"):
        assert line in caught.value.why
    assert caught.value.cure == "end other programs, or lower --memory to 61440MiB at most"


def test_memory_of_a_device_is_what_the_device_says():
    with pytest.raises(BudgetError, match="30.00 GiB is"):
        plan_budget(Readings(121 * GIB, 30 * GIB, 100 * GIB, unified=False), 0.8, TERMS, KV)


def test_an_explicit_size_passes_the_same_check():
    explicit = KVNeed(1 << 20, 16, 8192, explicit_bytes=90 * GIB)
    with pytest.raises(BudgetError, match=r"needs 152.00 GiB and the limit is 96.80 GiB") as caught:
        plan_budget(UNIFIED, 0.8, TERMS, explicit)
    assert "ask for fewer KV bytes (KV pages takes 90.00 GiB)" in caught.value.cure
    budget = plan_budget(UNIFIED, 0.8, TERMS, KVNeed(1 << 20, 16, 8192, explicit_bytes=(1 << 30) + 5))
    assert budget.pages == 1024


def test_weights_that_do_not_fit_are_refused_with_the_term_to_lower():
    terms = (
        Term("weights", 90 * GIB),
        Term("arena", 10 * GIB, "lower --max-prefill-tokens"),
        Term("slots", 1, "lower --max-batch-size"),
    )
    with pytest.raises(BudgetError) as caught:
        plan_budget(UNIFIED, 0.8, terms, KV)
    assert "the limit is 96.80 GiB" in caught.value.what
    assert caught.value.cure == "lower --max-prefill-tokens (arena takes 10.00 GiB)"


def test_a_sequence_that_was_asked_for_must_fit_and_another_may_shrink():
    readings = Readings(2 * GIB, 2 * GIB, 2 * GIB, unified=False)
    terms = (Term("weights", 2 * GIB - 10 * (1 << 20)),)
    small = plan_budget(readings, 1.0, terms, KVNeed(1 << 20, 16, 8192))
    assert (small.pages, small.tokens, small.max_seq_len) == (10, 160, 160)
    assert "limited to 160 tokens instead of 8192" in small.notes[0]
    with pytest.raises(BudgetError, match="160 tokens are left, and a sequence of 8192"):
        plan_budget(readings, 1.0, terms, KVNeed(1 << 20, 16, 8192, fixed=True))
    with pytest.raises(BudgetError):
        plan_budget(readings, 1.0, (Term("weights", 2 * GIB),), KVNeed(1 << 20, 16, 8192))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01])
def test_a_fraction_is_a_fraction(fraction):
    with pytest.raises(BudgetError):
        plan_budget(UNIFIED, fraction, TERMS, KV)


@given(
    st.integers(1, 1 << 40), st.floats(0.01, 1), st.lists(st.integers(0, 1 << 38), max_size=5), st.integers(1, 1 << 26),
    st.integers(1, 1 << 20), st.booleans(),
)  # fmt: skip
def test_a_plan_never_exceeds_its_limit_and_wastes_less_than_a_page(total, fraction, sizes, page, length, fixed):
    readings = Readings(total, total, total, unified=False)
    terms = [Term(f"t{index}", size) for index, size in enumerate(sizes)]
    try:
        budget = plan_budget(readings, fraction, terms, KVNeed(page, 16, length, fixed))
    except BudgetError as error:
        room = int(total * fraction) - sum(sizes)
        assert room < page or (fixed and room // page * 16 < length), error
        return
    used = sum(term.nbytes for term in budget.terms)
    assert budget.limit - page < used <= budget.limit <= total
    assert budget.max_seq_len == min(length, budget.pages * 16)
