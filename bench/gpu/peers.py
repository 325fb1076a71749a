"""vLLM beside Atlas, in the same command on the same machine: starts a bench script of vLLM and reads its JSON.

    python bench/gpu/peers.py --vllm SCRIPT CONFIG.json [--vllm-path SITE] [--batches 1,8,64] [--context 1024]

SCRIPT is called with a folder that holds config.json, ``--conc BATCHES --prompt TOKENS --gen TOKENS --ctx-decode '' --prefill LENGTHS --out FILE``.
It makes up the weights, decodes ``gen`` tokens behind prompts of ``prompt`` at each batch, reads one prompt of each length, and writes one JSON
object: ``decode`` holds objects with ``conc`` and ``decode_tok_s``, ``prefill`` holds ``s`` by length. SITE is the folder of vLLM's packages,
in place of those of this process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WAIT = 500.0
GENERATED = 256
PREFILL = (2048, 8192)
REPEATS = 2


def arguments(batches: Sequence[int], context: int) -> list[str]:
    """Of a script whose decoding sequences are ``context`` tokens long on average: the prompt and half of what follows it."""
    prompt = context - GENERATED // 2
    if prompt < 1:
        raise ValueError(f"a mean context of {context} leaves no prompt before {GENERATED} tokens")
    return [
        "--conc", ",".join(map(str, batches)), "--prompt", str(prompt), "--gen", str(GENERATED), "--ctx-decode", "",
        "--prefill", ",".join(map(str, PREFILL)), "--reps", str(REPEATS),
    ]  # fmt: skip


def vllm(
    script: Path,
    config: Mapping[str, Any],
    batches: Sequence[int],
    context: int,
    path: Path | None = None,
    wait: float = WAIT,
) -> Mapping[str, Any]:
    """What the script found. Raises RuntimeError with the end of its output when it fails or takes too long."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("_")}))
        out = folder / "found.json"
        command = [sys.executable, str(script), str(folder), *arguments(batches, context), "--out", str(out)]
        environment = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=wait, check=False, env=environment)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{script} took more than {wait:.0f} s") from error
        if done.returncode or not out.exists():
            raise RuntimeError(f"{script} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        found: Mapping[str, Any] = json.loads(out.read_text())
        return found


def decoded(found: Mapping[str, Any]) -> dict[int, float]:
    """Tokens a second by batch; a batch that failed is absent."""
    return {row["conc"]: row["decode_tok_s"] for row in found["decode"].values() if "decode_tok_s" in row}


def prompts(found: Mapping[str, Any]) -> dict[int, float]:
    """Milliseconds of one prompt by its length; one that failed is absent."""
    return {int(length): row["s"] * 1000 for length, row in found["prefill"].items() if "s" in row}


def main() -> None:
    """Run it and print what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--vllm-path", type=Path, help="the folder of vLLM's packages")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--context", type=int, default=1024)
    asked = parser.parse_args()
    batches = tuple(int(n) for n in asked.batches.split(","))
    config = json.loads(asked.config.read_text())
    print(json.dumps(vllm(asked.vllm, config, batches, asked.context, asked.vllm_path), indent=1))


if __name__ == "__main__":
    main()
