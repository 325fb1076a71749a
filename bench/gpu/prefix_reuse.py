"""The prefix cache on this GPU against float32 by torch: prompts gone on with must be as near to the truth as prompts read whole.

    python bench/gpu/prefix_reuse.py CONFIG.json [--layers 4] [--hardware hopper] [--length 1600] [--folder /dev/shm]

Weights are those of against_torch.py, a checkpoint of the model's own dimensions that is served as any. Prompts that begin alike, a second
turn and a repetition are generated from without the cache, in other pieces, with the cache, with so few pages and places of states
that both are given away and taken back, and side by side with so few pages that sequences are put back. Every logit of every answer
is compared with the reference of the same tokens. Exits 1 when a mean is above --mean, when the cache makes one larger by half,
when prompts of which the same is found do not get the same bits (with recurrent states those of the first reading, which is read in the same
pieces), or when nothing was found, given away or put back.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch_reference as reference
from against_torch import shortened
from msgspec.structs import replace

from atlas_core.assembly.engine import Built, Ledger, build
from atlas_core.engine.runner import Runner
from atlas_core.plugins import discover
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import read_settings
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams

WORSE = 1.5
"""By how much the cache may lengthen a mean distance: other pieces round otherwise, and no more."""
LONGEST, SLOTS = 4096, 4
Ids = list[int]


@dataclass
class Answer:
    """The prompt, how much of it was found, ids and logits [tokens, vocabulary]."""

    prompt: Ids
    found: int = 0
    ids: Ids = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)

    @property
    def logits(self) -> np.ndarray:
        """float32."""
        return np.stack(self.rows)


def served(
    built: Built, scheduler: Scheduler, prompts: Sequence[Ids], count: int, *, beside: bool = False
) -> list[Answer]:
    """Greedy answers of ``count`` tokens, one prompt after the other or all ``beside`` one another."""
    answers, runner = [Answer(prompt) for prompt in prompts], built.runner
    assert isinstance(runner, Runner)
    for group in [range(len(prompts))] if beside else [[i] for i in range(len(prompts))]:
        live = {}
        for index in group:
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            name = str(index)
            live[name] = scheduler.submit(Generate(name, tuple(prompts[index]), params), seed=0, stop_ids=())
        while live:
            plan = scheduler.schedule()
            assert plan is not None
            ticket = runner.launch(plan)
            logits = runner.read_logits(ticket)
            row_of = {plan.sequences[row].id: place for place, row in enumerate(plan.sample_row) if row >= 0}
            for sequence, token in scheduler.complete(plan, runner.collect(ticket).sampled):
                answer = answers[int(sequence.id)]
                answer.ids.append(token)
                answer.rows.append(logits[row_of[sequence.id]].copy())
                answer.found = sequence.found or 0
                if sequence.generated == count:
                    scheduler.finish(sequence)
                    del live[sequence.id]
            scheduler.check_integrity()
    return answers


def judged(label: str, answers: Sequence[Answer], config: Mapping[str, Any], weights: Mapping[str, Any]) -> list[float]:
    """Prints and returns each answer's mean distance from the reference of its own tokens."""
    means = []
    for answer in answers:
        want = reference.logits(config, dict(weights), answer.prompt + answer.ids[:-1])[len(answer.prompt) - 1 :]
        largest, mean, clear, agreed = reference.difference(want, answer.logits)
        means.append(mean)
        print(f"  {label:<28} prompt {len(answer.prompt):>5}, found {answer.found:>5}: mean |Δ| {mean:.5f}, max {largest:.4f}; "
              f"best token agrees at {agreed} of {clear}", flush=True)  # fmt: skip
    return means


def compared(built: Built, config: Mapping[str, Any], weights: Mapping[str, Any], asked: Any) -> list[str]:
    """Everything; what is wrong."""
    draw, count, limits = np.random.default_rng(asked.seed), asked.count, built.limits

    def ids(length: int) -> Ids:
        return [int(token) for token in draw.integers(0, config["vocab_size"], length)]

    whole = ids(asked.length)
    half = asked.length // 2
    prompts = [
        whole,
        whole,
        whole,
        whole + ids(asked.length // 10),
        whole[:half] + ids(half),
        whole[:half] + ids(half + 5),
    ]
    off = replace(limits, prefix_cache=False, snapshots=0)
    plain = served(built, Scheduler(off), prompts, count)
    turn = whole + plain[0].ids + ids(asked.length // 20)
    prompts.append(turn)
    plain += served(built, Scheduler(off), [turn], count)
    found: list[str] = []
    base = judged("without the cache", plain, config, weights)
    for piece in (1024, 64):
        judged(
            f"in pieces of {piece}",
            served(built, Scheduler(replace(off, max_prefill_tokens=piece)), [whole], count),
            config,
            weights,
        )
    cached = served(built, Scheduler(limits), prompts, count)
    means = {"with the cache": judged("with the cache", cached, config, weights)}
    other = ids(asked.length)
    scarce = Scheduler(_scarce(limits, 1, len(turn) + count))
    again = served(built, scarce, [whole, other, whole, turn, other, turn], count)
    means["few pages and places"] = judged("few pages and places", again, config, weights)
    # Each of these fills its last page with its answer's fourth token, and there is no other page.
    crowd = [ids(half // limits.page_tokens * limits.page_tokens - 4) for _ in range(3)]
    tight = Scheduler(_scarce(limits, len(crowd), len(crowd[0])))
    beside = served(built, tight, crowd, count, beside=True)
    means["side by side, put back"] = judged("side by side, put back", beside, config, weights)
    usual = max(base)
    for label, values in means.items():
        found += [
            f"{label}: answer {index} is {mean:.5f} off, without the cache {usual:.5f} at most"
            for index, mean in enumerate(values)
            if mean > min(WORSE * usual, asked.mean)
        ]
    # Where states are kept, pieces end at them, so that the first reading's last piece is what later ones compute.
    alike = cached[0:3] if limits.snapshots else cached[1:3]
    equal = all(np.array_equal(answer.logits, alike[0].logits) for answer in alike)
    print(f"  a prompt read again, {cached[1].found} of {len(whole)} tokens found: "
          f"{'the same bits' if equal else 'OTHER BITS'} in {count} rows of logits; "
          f"{scarce.tokens_evicted} tokens given away with few pages, {tight.preemptions} sequences put back")  # fmt: skip
    found += [] if equal else ["a prompt read again has other bits than before"]
    if not (cached[1].found and cached[3].found and cached[-1].found >= cached[1].found and again[3].found):
        found.append("a repetition or a next turn found nothing")
    if not (scarce.tokens_evicted and tight.preemptions):
        found.append("nothing was given away, or nobody was put back")
    return found


def _scarce(limits: Limits, sequences: int, tokens: int) -> Limits:
    """Pages with which so many sequences of so many tokens may begin, and a snapshot for each where there are any."""
    pages = sequences * limits.pages_for(tokens) + sequences - 1
    return replace(
        limits, max_seq_len=pages * limits.page_tokens, pages=(pages,) * len(limits.pages),
        snapshots=min(limits.snapshots, sequences),
    )  # fmt: skip


def main() -> int:
    """Make, serve, compare; the exit status says whether the gates held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hardware", default="hopper")
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("tests/data/tiny/qwen3/tokenizer.json"), help="any will do"
    )
    parser.add_argument("--length", type=int, default=1600, help="tokens of the prompt that others begin like")
    parser.add_argument("--count", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mean", type=float, default=1e-2)
    asked = parser.parse_args()
    config = shortened(json.loads(asked.config.read_text()), asked.layers)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        weights = reference.seeded(config, asked.seed)
        reference.save(config, weights, Path(folder))
        shutil.copy(asked.tokenizer, folder)
        settings = read_settings(
            {"model": folder, "hardware": asked.hardware, "max_batch_size": str(SLOTS), "max_seq_len": str(LONGEST),
             "memory": "20GiB"}, {},
        )  # fmt: skip
        built = build(settings, discover(), Ledger(lambda progress: None))
    print(
        f"{asked.config.stem}, {asked.layers} layers; pages of {built.limits.page_tokens} tokens, {built.limits.snapshots} snapshots"
    )
    try:
        found = compared(built, config, weights, asked)
    finally:
        built.close()
    print("\n".join(f"WRONG: {text}" for text in found) or "gates held")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
