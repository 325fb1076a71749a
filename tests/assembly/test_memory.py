"""Memory that the plan counts on and the device then does not have."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from atlas_core.assembly.machine import choose_machine
from atlas_core.assembly.memory import Weights, allocate, begin_loading, plan_memory, with_graphs
from atlas_core.assembly.model import open_model
from atlas_core.assembly.plan import make_plan
from atlas_core.plugins import discover
from atlas_core.runtime.null import NullBackend
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import BudgetError

TINY = Path(__file__).parents[1] / "data/tiny/llama"
CURES = {
    "weights": "use a smaller model or a smaller format",
    "slots": "lower --max-batch-size",
    "KV pages": "lower --memory",
    "inputs": "lower --max-batch-size",
    "activations": "lower --max-prefill-tokens",
    "scratch": "lower --max-prefill-tokens",
}


class Shrinking(NullBackend):
    """Refuses the allocation of that number, as if another program had been quicker."""

    def __init__(self, refused: int | None = None) -> None:
        super().__init__()
        self.refused = refused
        self.sizes: list[int] = []

    def alloc(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        if len(self.sizes) - 1 == self.refused:
            raise BudgetError(f"{nbytes} bytes cannot be had", "5 bytes are free", "end other programs")
        return super().alloc(nbytes)


@pytest.fixture(scope="module")
def planned():
    settings = read_settings({"model": str(TINY), "hardware": "cpu"}, {})
    registry = discover()
    machine = choose_machine(registry, "cpu")
    model = open_model(registry, settings, lambda done, total, note: None)
    yield make_plan(model, machine, settings), model
    model.checkpoint.close()


def run(planned, backend):
    plan, model = planned
    weights = Weights.of(plan, model)
    budget = plan_memory(plan, model, weights, 1 << 30, 1 << 30)
    held = begin_loading(backend, model, weights, budget, lambda done, total, note: None).finish()
    allocate(backend, backend.create_stream(), plan, weights, budget, held.buffers)
    return budget


def test_whatever_is_refused_is_named_with_what_lowers_it(planned):
    whole = Shrinking()
    budget = run(planned, whole)
    sizes = {term.name: term.nbytes for term in budget.terms}
    seen = []
    for number in range(len(whole.sizes)):
        backend = Shrinking(number)
        with pytest.raises(BudgetError) as caught:
            run(planned, backend)
        name = caught.value.what.removeprefix("the device has no room for ").partition(":")[0]
        assert caught.value.what == f"the device has no room for {name}: {sizes[name]} bytes in all"
        assert caught.value.why == f"{backend.sizes[-1]} bytes cannot be had; 5 bytes are free"
        assert caught.value.cure.startswith("end other programs that use this device, or ")
        assert CURES.get(name, "lower --") in caught.value.cure
        seen.append(name)
    assert set(CURES) <= set(seen)


def test_captured_steps_are_planned_and_then_measured(planned):
    plan, model = planned
    weights = Weights.of(plan, model)
    without, planned_for = (
        plan_memory(plan, model, weights, 1 << 30, 1 << 30, graphs=graphs) for graphs in (False, True)
    )
    terms = {term.name: term.nbytes for term in planned_for.terms}
    assert "graphs" not in {term.name for term in without.terms}
    assert terms["graphs"] > 1 << 20
    assert sum(terms.values()) <= planned_for.limit
    measured = with_graphs(planned_for, 12345)
    assert {term.name: term.nbytes for term in measured.terms} == terms | {"graphs": 12345}


def test_what_is_left_of_a_devices_own_memory_keeps_prefixes(planned):
    plan, model = planned
    weights = Weights.of(plan, model)

    def pages(shared, **settings):
        changed = replace(plan, settings=replace(plan.settings, **settings))
        return plan_memory(changed, model, weights, 1 << 30, 1 << 30, shared=shared).pages

    longest = plan.layout.slots.slots * plan.layout.slots.table_blocks[0]
    most = plan_memory(plan, model, weights, 1 << 30, 1 << 30, shared=False)
    assert pages(shared=True) == pages(shared=False, prefix_cache=False) == longest
    assert pages(shared=True, memory=1 << 29) == pages(shared=False, memory=1 << 29) > longest
    page = next(term.nbytes for term in most.terms if term.name == "KV pages") // most.pages
    assert 0 <= most.limit - sum(term.nbytes for term in most.terms) < page
    assert pages(shared=False) == most.pages > pages(shared=False, memory=1 << 29)
