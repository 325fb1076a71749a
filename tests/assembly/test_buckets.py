"""The closed list of captured shapes: whatever the scheduler plans has a graph, and full mixed steps have one of their own size."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.assembly.machine import choose_machine
from atlas_core.assembly.model import open_model
from atlas_core.assembly.plan import buckets, make_limits, make_plan, mixed_steps
from atlas_core.model.work import even_context
from atlas_core.ops.step import SlotLayout
from atlas_core.plugins import discover
from atlas_core.scheduler.limits import Limits
from atlas_core.settings import Settings, read_settings
from atlas_core.vocab.errors import UsageError

SHORT = 1024
TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"


def listed(rows=40, prefill=8192, mixed=None, longest=9216, bucketed=True, steps=()):
    layout = SlotLayout(rows, (longest // 64,), 8)
    settings = Settings(max_batch_size=rows, max_prefill_tokens=prefill, max_mixed_tokens=mixed, mixed_steps=steps)
    limits = Limits(
        layout,
        64,
        (longest // 64 * rows,),
        100,
        longest,
        prefill,
        0,
        4,
        max_mixed_tokens=mixed,
        mixed_steps=mixed_steps(settings),
    )
    return limits, buckets(settings, limits, bucketed)


@given(
    st.integers(1, 300), st.integers(1, 9000), st.none() | st.integers(1, 9000), st.integers(64, 9216).map(lambda n: n // 64 * 64)
)  # fmt: skip
def test_every_step_that_may_be_planned_has_a_graph(rows, prefill, mixed, longest):
    limits, found = listed(rows, prefill, mixed, longest)
    decode = [bucket for bucket in found if bucket.max_query == 1 and bucket.tokens == bucket.sequences]
    assert max(bucket.sequences for bucket in decode) == rows
    largest = found[-1]
    assert (largest.tokens, largest.sequences, largest.rows) == (limits.max_step_tokens, rows, rows)
    assert largest.max_query == min(prefill, longest)
    assert len({(b.tokens, b.sequences, b.max_query) for b in found}) == len(found)


@pytest.mark.parametrize(("mixed", "own"), [(384, True), (512, True), (None, False), (40, False), (9000, False)])
def test_a_full_mixed_step_pays_for_no_token_that_is_not_there(mixed, own):
    limits, found = listed(mixed=mixed)
    assert (mixed in {bucket.tokens for bucket in found if bucket.max_query > 1}) is own
    if own:
        assert all(decodes + limits.prompt_tokens(decodes) == mixed for decodes in range(1, 41))


def test_steps_that_fill_the_machine_have_graphs_of_their_own():
    limits, found = listed(mixed=496, steps=("384", "128:200", "640:700"))
    assert limits.mixed_steps == ((128, 200), (384, 384), (640, 700))
    prompts = {bucket.tokens for bucket in found if bucket.max_query > 1}
    assert {128, 384, 496} <= prompts
    assert 640 not in prompts


@pytest.mark.parametrize("steps", [("128", "128:130"), ("128", "256:128")])
def test_more_tokens_that_cost_no_more_are_refused(steps):
    with pytest.raises(UsageError, match="takes longer"):
        mixed_steps(Settings(mixed_steps=steps))


def test_short_prompts_are_captured_in_steps_of_fitting_sizes():
    _, found = listed()
    prompts = [bucket for bucket in found if bucket.max_query > 1]
    for tokens in range(1, SHORT + 1):
        fitting = min(b.tokens for b in prompts if b.tokens >= tokens and b.max_query >= tokens)
        assert fitting <= max(64, 4 * tokens)
        assert fitting <= 2 * tokens or tokens <= 128


def test_a_backend_that_reads_counts_everywhere_has_one():
    limits, (only,) = listed(bucketed=False)
    assert only.tokens == limits.max_step_tokens


def test_a_machine_proposes_sizes_and_what_attention_takes():
    registry, asked = discover(), {"hardware": "hopper", "model": str(TINY), "transcode": "bf16", "max_seq_len": "256"}
    machine, found = choose_machine(registry, "hopper"), []
    for more in ({}, {"attention_cost": "1"}, {"mixed_steps": ("64", "96:80")}):
        settings = read_settings(asked | more, {})
        model = open_model(registry, settings, lambda done, total, note: None)
        plan = make_plan(model, machine, settings)
        found.append(make_limits(model, plan.settings, plan.layout, 256, (64,), plan.program))
        model.checkpoint.close()
        tile = 128 if "mixed_steps" not in more else 32
        alike = even_context(plan.program, found[-1].max_mixed_tokens, tile)
        assert found[-1].even_context == round(alike / plan.settings.attention_cost)
    proposed, even, own = found
    assert proposed.mixed_steps == even.mixed_steps == ((256, 290), (384, 384), (512, 486), (640, 717))
    assert proposed.even_context < even.even_context
    assert own.mixed_steps == ((64, 64), (96, 80))
