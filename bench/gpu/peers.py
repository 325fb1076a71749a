# ruff: noqa: T201, INP001 -- a script that prints, and starts what it is told
"""vLLM beside Atlas, in the same command on the same machine: starts a bench script of vLLM and reads its JSON.

    python bench/gpu/peers.py --vllm SCRIPT CONFIG.json [--batches 1,8,64]

SCRIPT is called as ``SCRIPT FOLDER --conc 1,8,64 --out FILE`` with a folder that holds config.json; it makes up the weights and
writes one JSON object. Whatever keys that has are shown as they are: figures of another engine are its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WAIT = 500.0


def vllm(script: Path, config: Mapping[str, Any], batches: tuple[int, ...], wait: float = WAIT) -> Mapping[str, Any]:
    """What the script found. Raises RuntimeError with the end of its output when it fails or takes too long."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("_")}))
        out = folder / "found.json"
        listed = ",".join(map(str, batches))
        command = [sys.executable, str(script), str(folder), "--conc", listed, "--prefill", "2048", "--out", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=wait, check=False)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{script} took more than {wait:.0f} s") from error
        if done.returncode or not out.exists():
            raise RuntimeError(f"{script} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        found: Mapping[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    """Run it and print what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,64")
    asked = parser.parse_args()
    batches = tuple(int(n) for n in asked.batches.split(","))
    print(json.dumps(vllm(asked.vllm, json.loads(asked.config.read_text()), batches), indent=1))


if __name__ == "__main__":
    main()
