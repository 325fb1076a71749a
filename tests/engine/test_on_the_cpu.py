"""The loop over a real model: company, chunks and preemption change no token and no bit of a log-probability."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from test_loop import Session

from atlas_core.assembly.engine import Ledger, build
from atlas_core.assembly.machine import Machine
from atlas_core.engine.loop import Engine
from atlas_core.plugins import discover
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import read_settings
from atlas_core.vocab.messages import Generate, Ready
from atlas_core.vocab.sampling import SamplingParams

TINY = Path(__file__).parents[1] / "data" / "tiny"
WINDOWS = {"mistral": 8, "mistral of 40": 40}
"""Tokens that a token sees: less than a page, and pages and a half."""


@pytest.fixture(scope="module", params=["llama", *WINDOWS])
def built(request, tmp_path_factory):
    folder = TINY / request.param.split()[0]
    if request.param not in ("llama", "mistral"):
        folder = tmp_path_factory.mktemp("mistral")
        for file in (TINY / "mistral").iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": WINDOWS[request.param]}))
    sizes = {"max_batch_size": "6", "max_prefill_tokens": "48", "max_seq_len": "256"}
    settings = read_settings({"model": str(folder), "hardware": "cpu", **sizes}, {})
    result = build(settings, discover(), Ledger(lambda progress: None))
    (cache,) = result.model.spec.caches
    assert cache.window == WINDOWS.get(request.param)
    yield result
    result.close()


def requests(vocab):
    draw = np.random.default_rng(5)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "logit_bias": ((5, 8.0), (9, -100.0)), "min_tokens": 30},
    ]
    return [
        Generate(
            str(i),
            tuple(draw.integers(0, vocab, size=length).tolist()),
            SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=60, ignore_eos=i % 2 == 0, logprobs=3),
        )
        for i, length in enumerate([7, 90, 1, 33, 150, 64, 17, 12, 100, 5, 48, 49])
    ]


def engine_of(built, **changes):
    limits = replace(built.limits, **changes)
    info = Ready(limits.max_seq_len, limits.layout.slots, limits.vocab_size, "test")
    eos = built.model.spec.eos_token_ids
    return Engine(runner=built.runner, scheduler=Scheduler(limits), text=built.tokenizer, eos=eos, info=info)


def serve(engine, items):
    """Answers with their log-probabilities, the last gauges, and how many tokens each request found."""
    session = Session(engine=engine)
    session.send(*items)
    session.run()
    engine._closed = False  # the next session goes on with what this one left
    found = {item.id: session.deltas(item.id)[-1].cached_tokens for item in items}
    positions = {item.id: [p for d in session.deltas(item.id) for p in d.logprobs] for item in items}
    answers = {item.id: (session.answer(item.id), positions[item.id]) for item in items}
    return answers, session.results[-1].gauges, found


def run(built, items, **changes):
    return serve(engine_of(built, **changes), items)[:2]


def test_alone_together_and_preempted_give_the_same(built):
    items = requests(built.limits.vocab_size)
    alone = {}
    for item in items:
        alone |= run(built, [item])[0]
    together, gauges = run(built, items)
    assert gauges.preemptions == 0
    blocks = -(-built.limits.max_seq_len // built.limits.page_tokens)
    scarce, gauges = run(built, items, pages=(blocks + 2,), max_prefill_tokens=13)
    assert gauges.preemptions > 0
    assert together == alone
    assert scarce == alone
    assert len({tuple(tokens) for (tokens, *_), _ in alone.values()}) == len(items)


def test_the_prefix_cache_changes_no_token_and_no_bit(built):
    """Prompts that begin alike, a second turn of each, and too few pages for all that could be kept."""
    draw = np.random.default_rng(9)
    ids = draw.integers(0, built.limits.vocab_size, size=200).tolist()
    kinds = [request.sampling for request in requests(built.limits.vocab_size)]
    first = [
        Generate(str(i), (*ids[: 16 * (i % 4) + (i % 3) * 5], *ids[180 : 182 + i]), replace(kinds[i], max_tokens=40))
        for i in range(12)
    ] + [Generate(f"same {i}", tuple(ids[:64]), replace(kinds[1], seed=i, max_tokens=40)) for i in range(4)]
    plain, _ = run(built, first, prefix_cache=False)
    second = [Generate(f"{r.id}+", (*r.prompt, *plain[r.id][0][0], 7), r.sampling) for r in first]
    plain |= run(built, second, prefix_cache=False)[0]
    engine = engine_of(built, prefix_cache=True)
    cached, _, found = serve(engine, first)
    again, _, found_again = serve(engine, second)
    assert cached | again == plain
    assert all(found[f"same {i}"] == 48 for i in (1, 2, 3))
    assert all(found_again[r.id] >= len(r.prompt) - len(plain[r.id][0][0]) - 32 for r in second)
    blocks = -(-built.limits.max_seq_len // built.limits.page_tokens)
    scarce = engine_of(built, prefix_cache=True, pages=(blocks + 2,), max_prefill_tokens=13)
    results = [serve(scarce, some) for some in (first, second)]
    assert results[0][0] | results[1][0] == plain
    assert results[-1][1].preemptions > 0
    assert results[-1][1].kv_tokens_evicted > 0


def test_forbidden_and_favoured_tokens(built):
    answers, _ = run(built, requests(built.limits.vocab_size))
    (tokens, *_), _ = answers["5"]
    assert 9 not in tokens
    assert len(tokens) >= 30
    assert not set(tokens[:29]) & set(built.model.spec.eos_token_ids)


def test_a_device_with_other_processors_than_declared_is_planned_anew(monkeypatch):
    monkeypatch.setattr(Machine, "processors", 1000)
    settings = read_settings({"model": str(TINY / "llama"), "hardware": "cpu", "threads": "1", "max_seq_len": "64"}, {})
    result = build(settings, discover(), Ledger(lambda progress: None))
    result.close()
    steps = [step for bucket in result.plan.buckets for part in bucket.segments for step in part.steps]
    assert {step.need.processors for step in steps} == {1}
