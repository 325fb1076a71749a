"""``--count-experts``: what mixtures read is counted, and nothing that is said changes."""

from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from atlas_core.assembly.engine import Ledger, engine_of
from atlas_core.assembly.machine import choose_machine
from atlas_core.assembly.model import open_model
from atlas_core.assembly.plan import make_plan
from atlas_core.plugins import Registry
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import UsageError
from atlas_core.vocab.messages import Drain, Generate, StepResult
from atlas_core.vocab.sampling import SamplingParams

TINY = Path(__file__).parents[1] / "data" / "tiny"
PROMPTS = ([5, 9, 2, 77], [300, 41], [7, 7, 8, 200, 13, 4])


def decoded(built: Any, count: int) -> tuple[list[Any], list[tuple[int, int]], list[int]]:
    """(ids of each prompt, what each step of decoding counted, its rows)."""
    scheduler, steps, rows = Scheduler(built.limits), [], []
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    sequences = [
        scheduler.submit(Generate(str(index), tuple(prompt), params), seed=0, stop_ids=())
        for index, prompt in enumerate(PROMPTS)
    ]
    while (plan := scheduler.schedule()) is not None:
        output = built.runner.collect(built.runner.launch(plan))
        if plan.max_query == 1:
            steps.append(output.experts)
            rows.append(len(plan.row_slot))
        else:
            assert output.experts == (0, 0)
        for sequence, _ in scheduler.complete(plan, output.sampled):
            if sequence.generated == count:
                scheduler.finish(sequence)
    return [sequence.tokens[sequence.prompt_length :] for sequence in sequences], steps, rows


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_every_mixture_reads_from_its_share_up_to_one_for_each_row(make: Any, family: str) -> None:
    plain, counting = (make(TINY / family, max_batch_size=4, count_experts=count) for count in ("false", "true"))
    routed = counting.model.spec.family.experts
    layers, chosen, experts = len(routed.layers), routed.active, routed.count
    ids, steps, rows = decoded(counting, 12)
    uncounted, none, _ = decoded(plain, 12)
    assert ids == uncounted
    assert set(none) == {(0, 0)}
    assert len(steps) >= 10
    for (read, mixtures), sequences in zip(steps, rows, strict=True):
        assert mixtures == layers
        assert layers * chosen <= read <= layers * min(experts, sequences * chosen)
        assert sequences > 1 or read == layers * chosen
    assert any(read > layers * chosen for read, _ in steps)  # prompts that differ go different ways


def test_the_engine_tells_of_all_steps_so_far(make: Any, registry: Registry) -> None:
    built = make(TINY / "qwen3_moe", max_batch_size=1, count_experts="true")
    engine = engine_of(built, registry, Ledger(lambda progress: None))
    told: list[Any] = []
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    inbox: SimpleQueue[Any] = SimpleQueue()
    for message in (Generate("a", (5, 9, 2), params), Drain(5.0)):
        inbox.put(message)
    engine.run(inbox, told.append)
    gauges = [message.gauges for message in told if isinstance(message, StepResult)]
    assert all(a.mixtures_run <= b.mixtures_run for a, b in pairwise(gauges))
    routed = built.model.spec.family.experts
    layers, chosen = len(routed.layers), routed.active
    assert (gauges[-1].mixtures_run, gauges[-1].experts_read) == (5 * layers, 5 * layers * chosen)


def test_no_fused_op_hides_the_choice(registry: Registry) -> None:
    flags = {"model": str(TINY / "qwen3_moe"), "hardware": "hopper", "max_batch_size": "8", "dtype": "bf16"}
    machine = choose_machine(registry, "hopper", "sm_90a")
    settings = read_settings({**flags, "count_experts": "true", "load_format": "dummy"}, {})
    model = open_model(registry, settings, lambda done, total, note: None)
    plan = make_plan(model, machine, settings)
    names = {value.name for value in plan.program.choices}
    assert len(names) == 2
    for planned in plan.buckets:
        made = {value.name for seg in planned.segments for step in seg.steps for value in step.node.operands.values()}
        assert names <= made
        assert names <= planned.arena.offsets.keys()


def test_a_model_without_experts_is_refused(make: Any) -> None:
    with pytest.raises(UsageError, match="this model has none"):
        make(TINY / "qwen3", count_experts="true")
