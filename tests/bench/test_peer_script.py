"""bench/gpu/peers.py asks a peer's script for the contexts of our rows, and finds its figures."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).resolve().parents[2] / "bench/gpu/peers.py"
SCRIPT = """
import argparse, json, os, pathlib
p = argparse.ArgumentParser()
p.add_argument("folder", type=pathlib.Path)
for name in ("conc", "prompt", "gen", "ctx-decode", "prefill", "reps", "out"):
    p.add_argument(f"--{name}", required=True)
a = p.parse_args()
if json.loads((a.folder / "config.json").read_text()) != {"hidden_size": 8}:
    raise SystemExit("another config")
decode = {f"c{c}": {"conc": int(c), "decode_tok_s": 100.0 * int(c)} for c in a.conc.split(",")}
decode["broken"] = {"error": "out of memory"}
prefill = {n: {"s": int(n) / 1000} for n in a.prefill.split(",")}
mean = int(a.prompt) + int(a.gen) / 2
json.dump({"decode": decode, "prefill": prefill, "mean": mean, "path": os.environ["PYTHONPATH"]}, open(a.out, "w"))
"""


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers", PEERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_peer_decodes_at_the_mean_context_that_was_asked_for(peers: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    config = {"hidden_size": 8, "_source": "left out"}
    found = peers.vllm(tmp_path / "script.py", config, (1, 8), 1024, tmp_path)
    assert (found["mean"], found["path"]) == (1024, str(tmp_path))
    assert peers.decoded(found) == {1: 100.0, 8: 800.0}
    assert peers.prompts(found) == {2048: 2048.0, 8192: 8192.0}


def test_a_peer_that_fails_says_why(peers: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with pytest.raises(RuntimeError, match="another config"):
        peers.vllm(tmp_path / "script.py", {}, (1,), 1024, tmp_path)
    with pytest.raises(ValueError, match="no prompt"):
        peers.arguments((1,), 128)
