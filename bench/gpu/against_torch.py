"""Teacher-forced logits of a few layers of a real model's size, on this GPU and by torch in float32.

    python bench/gpu/against_torch.py CONFIG.json [--layers 4] [--hardware hopper] [--folder /dev/shm]

Random weights of the model's own dimensions (torch_reference.py says of which size) are saved as a checkpoint, which Atlas serves as it
would serve any: plan, loading, captured graphs. Prints for each way of reading the same tokens how far the logits are off, and how often
the best token is the same where the reference's lead is above 0.05. Exits 1 when the mean is above --mean or agreement below --agree.
Wants torch, and several GB in --folder.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch_reference as reference

from atlas_core.assembly.engine import Built, Ledger, build
from atlas_core.engine.forced import forced_logits
from atlas_core.engine.runner import Runner
from atlas_core.plugins import discover
from atlas_core.settings import read_settings

SLOTS = 64
WAYS = (("1 sequence, decoded", 1, 96, 0, 1), ("8 sequences, decoded", 8, 32, 0, 1), ("64 sequences, decoded", 64, 8, 0, 1),
        ("8 sequences, 8 tokens a step", 8, 64, 0, 8), ("1 sequence, 64 tokens a step", 1, 192, 0, 64),
        ("64 tokens behind a prompt", 1, 640, 576, 64))  # fmt: skip
"""How the tokens are read: label, sequences, tokens of each, of these in one step without logits, and at a time after them."""


def shortened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The configuration with so many layers; of nested ones that of the text model."""
    config = config.get("text_config", config)
    short = {key: value for key, value in config.items() if not key.startswith("_")} | {"num_hidden_layers": layers}
    if "layer_types" in short:
        short["layer_types"] = short["layer_types"][:layers]
    return short


def compared(built: Built, config: Mapping[str, Any], weights: Mapping[str, Any], asked: Any) -> bool:
    """Every way in turn; prints, and tells whether all gates held."""
    held = True
    assert isinstance(built.runner, Runner)
    for label, count, length, context, chunk in WAYS:
        ids = np.random.default_rng([asked.seed, count, length]).integers(0, config["vocab_size"], (count, length))
        got = forced_logits(built.runner, built.limits, ids.tolist(), chunk, context)
        rows = [
            _row(config, weights, sequence, context, found) for sequence, found in zip(ids.tolist(), got, strict=True)
        ]
        largest, clear, agreed = max(r[0] for r in rows), sum(r[2] for r in rows), sum(r[3] for r in rows)
        mean, deviation = float(np.mean([r[1] for r in rows])), float(np.mean([r[4] for r in rows]))
        agreement = agreed / max(clear, 1)
        good = mean <= asked.mean and agreement >= asked.agree
        held = held and good
        print(f"{label:<32} mean |Δ| {mean:.5f}, max {largest:.4f}, deviation {deviation:.2f}; "
              f"best token agrees at {agreed} of {clear} ({agreement:.2%}){'' if good else '  BROKEN'}")  # fmt: skip
    return held


def _row(
    config: Mapping[str, Any], weights: Mapping[str, Any], ids: Sequence[int], context: int, got: np.ndarray
) -> tuple[float, float, int, int, float]:
    want = reference.logits(config, dict(weights), list(ids))[context:]
    return (*reference.difference(want, got), float(want.std()))


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
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mean", type=float, default=1e-2)
    parser.add_argument("--agree", type=float, default=0.99)
    asked = parser.parse_args()
    config = shortened(json.loads(asked.config.read_text()), asked.layers)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        weights = reference.seeded(config, asked.seed)
        reference.save(config, weights, Path(folder))
        shutil.copy(asked.tokenizer, folder)
        made = time.perf_counter()
        settings = read_settings(
            {"model": folder, "hardware": asked.hardware, "max_batch_size": str(SLOTS), "max_seq_len": "1024",
             "memory": "32GiB"}, {},
        )  # fmt: skip
        built = build(settings, discover(), Ledger(lambda progress: None))
    print(f"{asked.config.stem}, {asked.layers} layers, {sum(w.numel() for w in weights.values()) / 1e9:.2f} G weights: "
          f"made in {made - began:.1f} s, ready in {time.perf_counter() - made:.1f} s")  # fmt: skip
    try:
        held = compared(built, config, weights, asked)
    finally:
        built.close()
    print("gates held" if held else "GATES BROKEN")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
