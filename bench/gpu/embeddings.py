"""Vectors of texts on this GPU against float32 by torch, for every kind of pooling.

    python bench/gpu/embeddings.py CONFIG.json [--layers 28] [--hardware hopper] [--folder /dev/shm]

Random weights of the model's own dimensions are saved as the sentence-transformers library saves models that embed texts, without a
head, and served as any. Prompts of 1 to 1,500 tokens, the longest in several steps, are embedded all at once and one by one. Exits 1 when a
vector is further from the reference's than --distance of its length, or from itself in company.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch_reference as reference
from against_torch import shortened

from atlas_core.assembly.engine import Built, Ledger, build
from atlas_core.engine.embedding import EmbeddingRunner
from atlas_core.plugins import discover
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import read_settings
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams

KINDS = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
"""Poolings, and what the library calls them."""
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 200, 513, 1500)
STEP = 512
"""Most tokens of a step."""


def describe(folder: Path, kind: str, size: int) -> None:
    """The library's files beside the weights."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
                for n, (path, name) in enumerate(modules)
            ]
        )
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == KINDS[kind] for name in (*KINDS.values(), "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": size, **modes}))


def vectors(built: Built, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """float32 [size] of each prompt, all at once."""
    runner = built.runner
    assert isinstance(runner, EmbeddingRunner)
    scheduler = Scheduler(built.limits)
    found: dict[str, np.ndarray] = {}
    for index, prompt in enumerate(prompts):
        request = Generate(str(index), tuple(prompt), SamplingParams(temperature=0.0, max_tokens=0), embed=True)
        scheduler.submit(request, seed=0, stop_ids=())
    while not scheduler.idle:
        plan = scheduler.schedule()
        assert plan is not None
        output = runner.launch(plan)
        ended = [plan.sequences[row].id for row in plan.sample_row]
        found |= {name: np.frombuffer(v, "<f4") for name, v in zip(ended, output.vectors or (), strict=True)}
        for sequence, _ in scheduler.complete(plan, output.sampled):
            scheduler.finish(sequence)
        scheduler.check_integrity()
    return [found[str(index)] for index in range(len(prompts))]


def distance(want: np.ndarray, got: np.ndarray) -> float:
    """Of a vector from another, in lengths of the first."""
    return float(np.linalg.norm(want - got) / np.linalg.norm(want))


def pooled(kind: str, states: np.ndarray) -> np.ndarray:
    """[size] of [tokens, size]."""
    chosen: np.ndarray = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[kind]
    return chosen


def main() -> int:
    """Make, serve, compare; the exit status says whether everything is near enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hardware", default="hopper")
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("tests/data/tiny/qwen3/tokenizer.json"), help="any will do"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--distance", type=float, default=2e-2)
    asked = parser.parse_args()
    config = shortened(json.loads(asked.config.read_text()), asked.layers)
    draw = np.random.default_rng(asked.seed)
    prompts = [[int(t) for t in draw.integers(0, config["vocab_size"], length)] for length in LENGTHS]
    held = True
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        weights = reference.seeded(config, asked.seed)
        states = [reference.hidden(config, dict(weights), prompt).cpu().numpy() for prompt in prompts]
        body = {key.removeprefix("model."): w for key, w in weights.items() if key != "lm_head.weight"}
        reference.save(config, body, folder)
        shutil.copy(asked.tokenizer, folder)
        for kind in KINDS:
            describe(folder, kind, config["hidden_size"])
            settings = read_settings(
                {"model": name, "hardware": asked.hardware, "max_batch_size": "8", "max_seq_len": "2048",
                 "max_prefill_tokens": str(STEP), "memory": "8GiB"}, {},
            )  # fmt: skip
            built = build(settings, discover(), Ledger(lambda progress: None))
            try:
                together = vectors(built, prompts)
                alone = [vectors(built, [prompt])[0] for prompt in prompts]
            finally:
                built.close()
            want = [pooled(kind, state) for state in states]
            off = [max(distance(w, v), distance(w, a)) for w, v, a in zip(want, together, alone, strict=True)]
            company = max(distance(a, v) for a, v in zip(alone, together, strict=True))
            good = max(off) <= asked.distance and company <= asked.distance
            held = held and good
            print(f"{kind:<5} of {len(prompts)} texts, {asked.layers} layers: distance from float32 {min(off):.5f} to {max(off):.5f} "
                  f"of the length, in company and alone {company:.5f}{'' if good else '  BROKEN'}", flush=True)  # fmt: skip
    print("gates held" if held else "GATES BROKEN")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
