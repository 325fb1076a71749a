"""Teacher-forced logits of one model on two machines: how far the GPU target is from the CPU's exact numerics.

    python bench/gpu/against_cpu.py MODEL [--hardware hopper] [--dtype f16 --transcode f16] [--goldens tests/data/goldens/smollm2.json]

Both sides go through the same assembly as a server: plan, weights, captured graphs. The GPU reads the weights transcoded and computes in
--dtype; the CPU reads them as stored and computes in float32. Prints max and mean |Δlogit| over every position of every golden prompt with its golden answer, and how
often both agree on the best token where the CPU's lead is above 0.05. Exits 1 when the mean is above --mean or agreement below --agree.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from atlas_core.assembly.engine import Ledger, build
from atlas_core.engine.forced import forced_logits
from atlas_core.engine.runner import Runner
from atlas_core.plugins import discover
from atlas_core.settings import read_settings

CHUNK = 8
LEAD = 0.05


def logits(model: str, prompts: list[list[int]], flags: dict[str, str]) -> list[np.ndarray]:
    """float32 [tokens, vocabulary] of every prompt."""
    settings = read_settings({"model": model, "max_batch_size": str(CHUNK), "max_seq_len": "1024", **flags}, {})
    built = build(settings, discover(), Ledger(lambda progress: None))
    try:
        print(f"{built.machine.name} ({built.machine.arch}): {built.backend.facts()}")
        assert isinstance(built.runner, Runner)
        return [forced_logits(built.runner, built.limits, [prompt], CHUNK)[0] for prompt in prompts]
    finally:
        built.close()


def main() -> int:
    """Compare; the exit status says whether the gates held."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--hardware", default="hopper")
    parser.add_argument("--dtype", default="f16", choices=("bf16", "f16"))
    parser.add_argument("--transcode", default="f16", choices=("none", "bf16", "f16"))
    parser.add_argument("--goldens", type=Path, default=Path("tests/data/goldens/smollm2.json"))
    parser.add_argument("--mean", type=float, default=2e-2)
    parser.add_argument("--agree", type=float, default=0.99)
    asked = parser.parse_args()
    golden = json.loads(asked.goldens.read_text())["prompts"]
    prompts = [p["prompt_ids"] + p["generated_ids"] for p in golden]
    want = logits(asked.model, prompts, {"hardware": "cpu", "numerics": "exact"})
    got = logits(asked.model, prompts, {"hardware": asked.hardware, "dtype": asked.dtype, "transcode": asked.transcode})
    worst = max(float(np.abs(g - w).max()) for g, w in zip(got, want, strict=True))
    mean = sum(float(np.abs(g - w).sum()) for g, w in zip(got, want, strict=True)) / sum(w.size for w in want)
    clear = agreed = 0
    for g, w in zip(got, want, strict=True):
        top = np.sort(np.partition(w, -2, axis=1)[:, -2:], axis=1)
        lead = top[:, 1] - top[:, 0] > LEAD
        clear += int(lead.sum())
        agreed += int((g.argmax(1) == w.argmax(1))[lead].sum())
    print(f"positions {sum(map(len, prompts))}, logits max |Δ| {worst:.4f}, mean |Δ| {mean:.5f}")
    print(f"best token agrees at {agreed} of {clear} positions with a lead above {LEAD} ({agreed / clear:.2%})")
    held = mean <= asked.mean and agreed / clear >= asked.agree
    print("gates held" if held else "GATES BROKEN")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
