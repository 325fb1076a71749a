"""Tiny random checkpoints of every dense family against logits computed by the reference implementation in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_core.engine.forced import forced_logits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams

TINY = Path(__file__).parents[1] / "data" / "tiny"
FAMILIES = ["llama", "mistral", "minimax_m2", "gemma3"]
TOLERANCE = 1e-4


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def golden(family: str) -> dict[str, np.ndarray]:
    with np.load(TINY / family / "golden.npz") as file:
        return dict(file)


def greedy(built: Any, prompt: np.ndarray, count: int) -> list[int]:
    """Greedy continuation through scheduler and runner."""
    scheduler = Scheduler(built.limits)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    sequence = scheduler.submit(Generate("g", tuple(map(int, prompt)), params), seed=0, stop_ids=())
    for _ in range(count):
        plan = scheduler.schedule()
        while plan is not None and not plan.sample_row:
            scheduler.complete(plan, built.runner.collect(built.runner.launch(plan)).sampled)
            plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(plan, built.runner.collect(built.runner.launch(plan)).sampled)
    return sequence.tokens[len(prompt) :]


def test_logits_of_every_position(make: Any, family: str, golden: dict[str, np.ndarray]) -> None:
    built = make(TINY / family, max_batch_size=64)
    whole = np.concatenate([golden["input_ids"], golden["gen_ids"]])
    (logits,) = forced_logits(built.runner, built.limits, [whole.tolist()], chunk=64)
    want = np.concatenate([golden["prefill_logits"], golden["step_logits"][1:]])
    assert np.abs(logits[: len(want)] - want).max() <= TOLERANCE
    np.testing.assert_allclose(logits[23], golden["step_logits"][0], atol=TOLERANCE)
    (long,) = forced_logits(built.runner, built.limits, [golden["long_ids"].tolist()], chunk=64)
    assert np.abs(long[-1] - golden["long_last_logits"]).max() <= TOLERANCE


def test_greedy_ids(make: Any, family: str, golden: dict[str, np.ndarray]) -> None:
    built = make(TINY / family, max_batch_size=2)
    assert greedy(built, golden["input_ids"], 16) == golden["gen_ids"].tolist()
    assert greedy(built, golden["long_ids"], 16) == golden["long_gen_ids"].tolist()


def test_greedy_ids_when_the_prompt_comes_in_pieces(make: Any, family: str, golden: dict[str, np.ndarray]) -> None:
    built = make(TINY / family, max_batch_size=2, max_prefill_tokens=7)
    assert greedy(built, golden["long_ids"], 16) == golden["long_gen_ids"].tolist()


@pytest.mark.parametrize("chunk", [1, 7])
def test_bits_do_not_depend_on_pieces(make: Any, family: str, golden: dict[str, np.ndarray], chunk: int) -> None:
    built = make(TINY / family, max_batch_size=64)
    tokens = golden["long_ids"].tolist()
    (whole,) = forced_logits(built.runner, built.limits, [tokens], chunk=64)
    (pieces,) = forced_logits(built.runner, built.limits, [tokens], chunk=chunk)
    np.testing.assert_array_equal(pieces.view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("chunk", [1, 7])
def test_bits_do_not_depend_on_neighbours(make: Any, family: str, golden: dict[str, np.ndarray], chunk: int) -> None:
    built = make(TINY / family, max_batch_size=64)
    draw = np.random.default_rng(1)
    prompts = [
        golden["long_ids"].tolist(),
        *(draw.integers(0, 490, size=n).tolist() for n in (3, 90, 17, 150, 64, 1, 33)),
    ]
    together = forced_logits(built.runner, built.limits, prompts, chunk=chunk)
    for prompt, got in zip(prompts, together, strict=True):
        (alone,) = forced_logits(built.runner, built.limits, [prompt], chunk=64)
        np.testing.assert_array_equal(got.view(np.uint32), alone.view(np.uint32))


def test_bits_do_not_depend_on_threads(make: Any, family: str, golden: dict[str, np.ndarray]) -> None:
    tokens = golden["long_ids"].tolist()
    one, two = (make(TINY / family, max_batch_size=64, threads=threads) for threads in (1, 2))
    (first,), (second,) = (forced_logits(b.runner, b.limits, [tokens], chunk=64) for b in (one, two))
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))


def test_pages_of_other_sizes_give_the_same_bits(make: Any, family: str, golden: dict[str, np.ndarray]) -> None:
    tokens = golden["long_ids"].tolist()
    small, large = (make(TINY / family, max_batch_size=64, block_size=size) for size in (1, 64))
    (first,), (second,) = (forced_logits(b.runner, b.limits, [tokens], chunk=64) for b in (small, large))
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))
