"""Tiny random checkpoints of the Qwen family against logits computed by the reference implementation in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from atlas_core.assembly.explain import explain
from atlas_core.engine.forced import forced_logits
from atlas_core.plugins import Registry
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import UsageError
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams

TINY = Path(__file__).parents[1] / "data" / "tiny"
HYBRIDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
FAMILIES = ["qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", *HYBRIDS]
TOLERANCE = 2e-4


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def golden(family: str) -> dict[str, np.ndarray]:
    with np.load(TINY / family / "golden.npz") as file:
        return dict(file)


def greedy(built: Any, prompts: list[np.ndarray], count: int, scheduler: Scheduler | None = None) -> list[list[int]]:
    """Greedy continuations through scheduler and runner, all prompts submitted at once."""
    scheduler = scheduler or Scheduler(built.limits)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    sequences = [
        scheduler.submit(Generate(str(index), tuple(map(int, prompt)), params), seed=0, stop_ids=())
        for index, prompt in enumerate(prompts)
    ]
    while (plan := scheduler.schedule()) is not None:
        for sequence, _ in scheduler.complete(plan, built.runner.collect(built.runner.launch(plan)).sampled):
            if sequence.generated == count:
                scheduler.finish(sequence)
    scheduler.check_integrity()
    return [sequence.tokens[sequence.prompt_length :] for sequence in sequences]


def reference(golden: dict[str, np.ndarray]) -> tuple[list[int], np.ndarray]:
    """24 prompt and 16 generated tokens, and the logits of all but the last."""
    tokens = np.concatenate([golden["input_ids"], golden["gen_ids"]])
    return tokens.tolist(), np.concatenate([golden["prefill_logits"], golden["step_logits"][1:]])


def test_logits_of_every_position(make: Any, family: str, golden: dict[str, np.ndarray]) -> None:
    built = make(TINY / family, max_batch_size=64)
    tokens, want = reference(golden)
    (logits,) = forced_logits(built.runner, built.limits, [tokens], chunk=64)
    assert np.abs(logits[: len(want)] - want).max() <= TOLERANCE
    np.testing.assert_allclose(logits[23], golden["step_logits"][0], atol=TOLERANCE)
    (long,) = forced_logits(built.runner, built.limits, [golden["long_ids"].tolist()], chunk=64)
    assert np.abs(long[-1] - golden["long_last_logits"]).max() <= TOLERANCE


@pytest.mark.parametrize("pieces", [512, 7])
def test_greedy_ids(make: Any, family: str, golden: dict[str, np.ndarray], pieces: int) -> None:
    built = make(TINY / family, max_batch_size=2, max_prefill_tokens=pieces)
    assert greedy(built, [golden["input_ids"]], 16) == [golden["gen_ids"].tolist()]
    assert greedy(built, [golden["long_ids"]], 16) == [golden["long_gen_ids"].tolist()]
    both = greedy(built, [golden["long_ids"], golden["input_ids"]], 16)
    assert both == [golden["long_gen_ids"].tolist(), golden["gen_ids"].tolist()]


@pytest.mark.parametrize("chunk", [1, 64, 128])
def test_bits_do_not_depend_on_pieces(make: Any, family: str, golden: dict[str, np.ndarray], chunk: int) -> None:
    built = make(TINY / family, max_batch_size=150)
    tokens = golden["long_ids"].tolist()
    (whole,) = forced_logits(built.runner, built.limits, [tokens], chunk=150)
    (pieces,) = forced_logits(built.runner, built.limits, [tokens], chunk=chunk)
    np.testing.assert_array_equal(pieces.view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("chunk", [1, 7])
def test_bits_do_not_depend_on_neighbours_or_threads(
    make: Any, family: str, golden: dict[str, np.ndarray], chunk: int
) -> None:
    one, two = (make(TINY / family, max_batch_size=64, threads=threads) for threads in (1, 2))
    draw = np.random.default_rng(1)
    prompts = [golden["long_ids"].tolist(), *(draw.integers(0, 490, size=n).tolist() for n in (3, 90, 17, 64, 1, 33))]
    together = forced_logits(two.runner, two.limits, prompts, chunk=chunk)
    for prompt, got in zip(prompts, together, strict=True):
        (alone,) = forced_logits(one.runner, one.limits, [prompt], chunk=64)
        np.testing.assert_array_equal(got.view(np.uint32), alone.view(np.uint32))


def test_the_newer_spelling_of_config_is_the_same_model(make: Any, family: str, tmp_path: Path) -> None:
    for file in (TINY / family).iterdir():
        if file.name not in ("config.json", "config.v5.json"):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").symlink_to(TINY / family / "config.v5.json")
    old, new = make(TINY / family).model.spec, make(tmp_path).model.spec
    assert new == old


def test_gguf_names_of_the_dense_models(make: Any) -> None:
    """The same weights in q8_0: the greedy ids are kept, and logits are off by what eight bits cost."""
    with np.load(TINY / "qwen3" / "golden.npz") as file:
        golden = dict(file)
    built = make(TINY / "qwen3" / "model.Q8_0.gguf", max_batch_size=64)
    tokens, want = reference(golden)
    (logits,) = forced_logits(built.runner, built.limits, [tokens], chunk=64)
    assert np.abs(logits[: len(want)] - want).max() < 0.2
    assert logits[23 : len(want)].argmax(-1).tolist() == golden["gen_ids"].tolist()


def test_a_sequence_that_gave_its_place_up_goes_on_with_the_same_ids(
    make: Any, family: str, golden: dict[str, np.ndarray]
) -> None:
    """Pages for little more than one of four: the younger ones are put out and computed again in slots that others used."""
    roomy, tight = (
        make(TINY / family, max_batch_size=4),
        make(TINY / family, max_batch_size=4, **few_pages(make, family)),
    )
    prompts = [golden["long_ids"][start : start + 40] for start in range(0, 80, 20)]
    want = greedy(roomy, prompts, 60)
    scheduler = Scheduler(tight.limits)
    assert greedy(tight, prompts, 60, scheduler) == want
    assert scheduler.preemptions > 0
    assert len({tuple(ids) for ids in want}) == len(want)


def few_pages(make: Any, family: str) -> dict[str, Any]:
    """Flags for a server whose cache holds about 160 tokens."""
    plain = make(TINY / family, max_batch_size=4, max_seq_len=128, max_prefill_tokens=64)
    fixed = sum(term.nbytes for term in plain.budget.terms if term.name != "KV pages")
    page = next(term.nbytes for term in plain.budget.terms if term.name == "KV pages") // plain.budget.pages
    return {"max_seq_len": 128, "max_prefill_tokens": 64, "memory": fixed + -(-160 // plain.limits.page_tokens) * page}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_slot_never_sees_the_states_of_the_one_before(make: Any, golden: dict[str, np.ndarray], family: str) -> None:
    """One slot, used by sequences that are dropped in the middle, and that run to their end."""
    built = make(TINY / family, max_batch_size=1, max_prefill_tokens=32)
    scheduler = Scheduler(built.limits)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    dropped = scheduler.submit(Generate("x", tuple(range(3, 100)), params), seed=0, stop_ids=())
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(plan, built.runner.collect(built.runner.launch(plan)).sampled)
    scheduler.finish(dropped)
    for prompt, want in (("input_ids", "gen_ids"), ("long_ids", "long_gen_ids"), ("input_ids", "gen_ids")):
        assert greedy(built, [golden[prompt]], 16, scheduler) == [golden[want].tolist()]


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_are_in_the_budget(make: Any, family: str) -> None:
    sizes = ((1, 0), (4, 0), (1, 3))
    one, four, more = (make(TINY / family, max_batch_size=slots, state_snapshots=kept) for slots, kept in sizes)
    terms = [{term.name: term.nbytes for term in built.budget.terms} for built in (one, four, more)]
    # Three layers of three inputs of 128 channels, and of four heads of 16 by 16.
    assert terms[0]["state.linear.convolution"] == 3 * 3 * 128 * 4
    assert terms[0]["state.linear.delta"] == 3 * 4 * 16 * 16 * 4
    assert all(terms[1][name] == terms[2][name] == 4 * terms[0][name] for name in terms[0] if name.startswith("state."))
    assert one.limits.layout.table_blocks == four.limits.layout.table_blocks
    assert len(one.limits.layout.table_blocks) == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_random_weights_of_every_layer_kind(make: Any, family: str) -> None:
    """``--load-format dummy``: experts come one by one, fused projections whole, and the step gives finite logits."""
    built = make(TINY / family, load_format="dummy", max_batch_size=8)
    (logits,) = forced_logits(built.runner, built.limits, [list(range(8))], chunk=8)
    assert np.isfinite(logits).all()
    assert logits.std(axis=0).max() > 0


def test_the_plan_shows_states_beside_pages(registry: Registry) -> None:
    settings = read_settings({"model": str(TINY / "qwen3_next"), "hardware": "cpu", "max_batch_size": "3"}, {})
    found = explain(registry, settings)
    assert [*found["caches"]] == ["cache.attention"]
    assert found["states"] == {
        "linear.convolution": {"layers": 3, "slots": 3, "snapshots": 16, "shape": [3, 128]},
        "linear.delta": {"layers": 3, "slots": 3, "snapshots": 16, "shape": [4, 16, 16]},
    }


def served(built: Any, limits: Limits, prompts: list[list[int]], count: int) -> tuple[list[Any], list[int]]:
    """Requests one after another: (ids, bits of the logits of each) and how many tokens of each prompt were found."""
    scheduler = Scheduler(limits)
    answers, found = [], []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        sequence = scheduler.submit(Generate(str(index), tuple(prompt), params), seed=0, stop_ids=())
        bits = []
        while not sequence.finished and (plan := scheduler.schedule()) is not None:
            ticket = built.runner.launch(plan)
            logits = built.runner.read_logits(ticket)
            bits += [logits.tobytes() for _ in scheduler.complete(plan, built.runner.collect(ticket).sampled)]
            scheduler.check_integrity()
            if sequence.generated == count:
                scheduler.finish(sequence)
        answers.append((sequence.tokens[sequence.prompt_length :], bits))
        found.append(sequence.found or 0)
    return answers, found


@pytest.mark.parametrize("pieces", [16, 48, 512])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", *HYBRIDS])
def test_case_50_what_is_reused_changes_no_bit(
    make: Any, family: str, golden: dict[str, np.ndarray], pieces: int
) -> None:
    built = make(TINY / family, max_batch_size=2, max_prefill_tokens=pieces)
    prompt = golden["long_ids"].tolist()
    other = np.random.default_rng(7).integers(0, 490, size=80).tolist()
    prompts = [prompt, prompt + other[:9], prompt + other[9:40], prompt[:75] + other, prompt[:75] + other[::-1], prompt]
    off = replace(built.limits, prefix_cache=False, snapshots=0)
    want, none = served(built, off, prompts, 70)
    turn = [*prompt, *want[0][0], *other[:5]]
    prompts.append(turn)
    want += served(built, off, [turn], 70)[0]
    # Of tiny prompts little is to be gained; snapshots are taken all the same here.
    got, found = served(built, replace(built.limits, least=48), prompts, 70)
    assert got == want
    assert none == [0] * 6
    last = (len(turn) - 1) // 64 * 64 if family in HYBRIDS else (len(turn) - 6) // 16 * 16
    tail = 128 if family in HYBRIDS else (len(prompt) - 1) // 16 * 16
    assert found[:3] == [0, tail, tail]
    assert found[3:5] == ([0, 64] if family in HYBRIDS else [64, 64])
    assert found[5:] == [tail, last]


@pytest.mark.parametrize("family", HYBRIDS)
def test_places_of_states_that_are_short_change_no_id(make: Any, golden: dict[str, np.ndarray], family: str) -> None:
    """Four at once, again and again, with preemption, and two snapshots for all."""
    built = make(TINY / family, max_batch_size=4, state_snapshots=2, **few_pages(make, family))
    ids = golden["long_ids"]
    prompts = [ids[:50], ids[:50], np.concatenate([ids[:40], ids[90:100]]), ids[20:60]]
    want = greedy(built, prompts, 60, Scheduler(replace(built.limits, prefix_cache=False, snapshots=0)))
    scheduler = Scheduler(replace(built.limits, chunk=16, least=16))
    for _ in range(3):
        assert greedy(built, prompts, 60, scheduler) == want
    assert scheduler.preemptions > 0


def test_a_hybrid_without_snapshots_has_no_prefix_cache(make: Any) -> None:
    folder = TINY / "qwen3_next"
    assert not make(folder, state_snapshots=0).limits.prefix_cache
    with pytest.raises(UsageError, match="asks for a prefix cache"):
        make(folder, state_snapshots=0, prefix_cache="true")


def test_checkpoints_that_go_under_another_name(make: Any, tmp_path: Path) -> None:
    for file in (TINY / "qwen3_5_moe").iterdir():
        if not file.name.startswith("config"):
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((TINY / "qwen3_5_moe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_6_moe"}))
    assert make(tmp_path).model.spec == make(TINY / "qwen3_5_moe").model.spec
