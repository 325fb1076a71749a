"""Once the engine is ready nothing is compiled, loaded, looked up or captured: not for any request, not in any bucket."""

import ctypes
import subprocess
from pathlib import Path

import pytest
from test_loop import Session
from test_on_the_cpu import requests

from atlas_core.assembly.engine import Ledger, build
from atlas_core.assembly.machine import choose_machine
from atlas_core.assembly.memory import Weights, allocate, begin_loading, plan_memory, with_inputs
from atlas_core.assembly.model import open_model
from atlas_core.assembly.plan import make_limits, make_plan
from atlas_core.engine.inputs import InputLayout
from atlas_core.engine.loop import Engine
from atlas_core.engine.rings import Results, Rings
from atlas_core.engine.runner import Runner
from atlas_core.kernels.library import KernelLibrary
from atlas_core.plugins import discover
from atlas_core.runtime.bound import bind_step
from atlas_core.runtime.null import NullBackend
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import read_settings
from atlas_core.text.tokenizer import Tokenizer
from atlas_core.vocab.messages import Ready

MODEL = Path(__file__).parents[1] / "data" / "tiny" / "llama"
SIZES = {"model": str(MODEL), "max_batch_size": "6", "max_prefill_tokens": "48", "max_seq_len": "256"}
FORBIDDEN = ("kernel", "alloc", "alloc_pinned", "begin_capture", "end_capture", "create_stream")


def serve_without(monkeypatch, backend, runner, limits, text, forbidden):
    """Every kind of request, alone and together, while what belongs to the start fails."""

    def refused(what):
        def refuse(*args, **kwargs):
            pytest.fail(f"{what}{args} after the engine was ready")

        return refuse

    for what in forbidden:
        monkeypatch.setattr(backend, what, refused(what))
    monkeypatch.setattr(KernelLibrary, "find", refused("KernelLibrary.find"))
    monkeypatch.setattr(subprocess, "Popen", refused("Popen"))
    monkeypatch.setattr(ctypes, "CDLL", refused("CDLL"))
    session = Session(
        engine=Engine(
            runner=runner, scheduler=Scheduler(limits), text=text, eos=(), info=Ready(256, 6, limits.vocab_size, "")
        )
    )
    items = requests(limits.vocab_size)
    for count, item in enumerate(items):
        session.script[count + 1] = (item,)
    session.send(items[0])
    session.script.pop(1)
    session.run()
    assert all(session.answer(item.id)[2] in ("length", "stop") for item in items)


def test_on_the_cpu(monkeypatch):
    built = build(read_settings({"hardware": "cpu", **SIZES}, {}), discover(), Ledger(lambda progress: None))
    try:
        with monkeypatch.context() as patched:
            serve_without(patched, built.backend, built.runner, built.limits, built.tokenizer, FORBIDDEN)
    finally:
        built.close()


def test_on_a_gpu_that_computes_nothing(monkeypatch):
    settings, registry = read_settings({"hardware": "hopper", "transcode": "bf16", **SIZES}, {}), discover()
    machine = choose_machine(registry, "hopper")
    model = open_model(registry, settings, lambda done, total, note: None)
    plan = make_plan(model, machine, settings)
    assert len(plan.buckets) > 3
    backend = NullBackend(asynchronous=True, bucketed=True)
    stream, weights = backend.create_stream(), Weights.of(plan, model)
    budget = plan_memory(plan, model, weights, *backend.memory())
    limits = make_limits(model, plan.settings, plan.layout, budget.max_seq_len, (budget.pages,), plan.program)
    held = begin_loading(backend, model, weights, budget, lambda done, total, note: None).finish()
    memory, inputs, states = allocate(backend, stream, plan, weights, budget, held.buffers)
    # Nobody computes what a step leaves, and what memory held before may be no token.
    backend.memset_async(memory.arena.address, 0, memory.arena.nbytes, stream)
    steps, results = [], Results.of(value.name for value in plan.program.results)
    rings = Rings(backend, [planned.bucket for planned in plan.buckets], states["mask"], model.spec.vocab_size)
    for planned in plan.buckets:
        local = with_inputs(memory, InputLayout(planned.bucket), inputs)
        frame = rings.frame(inputs, planned.bucket, results)
        steps.append((planned.bucket, bind_step(backend, planned.segments, planned.arena, local, stream, frame)))
    runner = Runner(
        backend,
        stream,
        steps,
        inputs=inputs,
        states=states,
        vocab_size=model.spec.vocab_size,
        results=results,
        rings=rings,
    )
    text = Tokenizer(model.checkpoint.tokenizer(), lazy=True)
    with monkeypatch.context() as patched:
        serve_without(patched, backend, runner, limits, text, (*FORBIDDEN, "prepare_launch"))
    runner.close()
    model.checkpoint.close()
