"""Atlas against llama.cpp on one CPU: same files, same threads, both in this run, in turns.

    python -m venv peer && CMAKE_ARGS=-DGGML_NATIVE=ON peer/bin/pip install --no-binary llama-cpp-python llama-cpp-python numpy
    python bench/cpu_vs_llama_cpp.py --peer peer/bin/python --model SmolLM2-135M-Instruct.Q4_1.gguf

Speeds are tokens per CPU second (user and system time of the process) with one thread, so that a shared machine is fair to
both; the median of rounds A B A B. Files beside the first are made once, in --folder. Both sample greedily.
"""

import argparse
import operator
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cpu.children import Engines, competitors, read_bandwidth
from cpu.files import KINDS, encoded, gemma_shaped

DECODED, PROMPT_TOKENS, COMPETITORS, DECODED_UNDER_LOAD = 48, 512, 8, 12
GOALS = {"Q4_1": (1.2, 2.5)}
OTHER_GOALS = (1.05, 1.1)
LOAD_GOAL = 0.9


def speeds(engines: Engines, model: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Median tokens per CPU second of each engine: decode and prompt, one thread."""
    with engines.start("atlas", model, 1) as atlas, engines.start("peer", model, 1) as peer:
        print(f"    {atlas.ready['flags']}\n    {peer.ready['flags']}")
        found: dict[str, dict[str, list[float]]] = {"atlas": {}, "peer": {}}
        for _ in range(rounds):
            for name, child in (("atlas", atlas), ("peer", peer)):
                found[name].setdefault("decode", []).append(child.decode(DECODED)[0])
                found[name].setdefault("prompt", []).append(child.prompt(PROMPT_TOKENS)[0])
    return {name: {what: statistics.median(values) for what, values in by.items()} for name, by in found.items()}


def under_load(engines: Engines, model: Path, rounds: int) -> dict[str, float]:
    """Decoded tokens per second with two threads over those with one, beside competing processes."""
    ratios = {}
    for name in engines.names:
        with engines.start(name, model, 1) as one, engines.start(name, model, 2) as two, competitors(COMPETITORS):
            # The peer has no goal here, and takes minutes.
            times = rounds if name == "atlas" else 1
            pairs = [(two.decode(DECODED_UNDER_LOAD)[1], one.decode(DECODED_UNDER_LOAD)[1]) for _ in range(times)]
        ratios[name] = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    return ratios


def starts(engines: Engines, model: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds from file to first token: (imports excluded, whole process)."""

    def measured(name: str) -> tuple[float, float]:
        with engines.start(name, model, 1) as child:
            return child.ready["first_token"], child.spawned

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines.names}
    for name in engines.names:
        measured(name)  # its files are in memory and its modules compiled, as after any first start
    for _ in range(rounds):
        for name in engines.names:
            found[name].append(measured(name))
    return {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for name, rows in found.items()
    }


def _row(what: str, ours: float, theirs: float, goal: float, better: Callable[[float, float], bool]) -> None:
    ratio = ours / theirs
    print(
        f"    {what:<44} {ours:9.2f} {theirs:9.2f}  ratio {ratio:5.2f}  goal {goal:4.2f}  {'ok' if better(ratio, goal) else 'MISSED'}"
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--model", required=True, type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--folder", type=Path, default=Path("build-bench"), help="where other encodings are kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose name contains this: an encoding, load, or start")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    engines = Engines(arguments.peer)
    source, folder = arguments.model, arguments.folder
    makers: dict[str, Callable[[], Path]] = {
        name: partial(encoded, source, folder, engines, name) for name in ("Q4_1", *KINDS)
    }
    makers |= {
        f"gemma-shaped {layout.upper()}": partial(gemma_shaped, source, folder, layout) for layout in ("q4_0", "q4_k")
    }
    bandwidth = read_bandwidth()
    print(f"one thread reads {bandwidth / 1e9:.1f} GB/s; columns: atlas, peer")
    for name, made in makers.items():
        if arguments.only and arguments.only not in name:
            continue
        model = made()
        print(f"{name}: {model.stat().st_size / 1e6:.0f} MB")
        found = speeds(engines, model, arguments.rounds)
        decode_goal, prompt_goal = GOALS.get(name, OTHER_GOALS)
        ours, theirs = found["atlas"], found["peer"]
        share = ours["decode"] * model.stat().st_size / bandwidth
        _row("decode, tokens per CPU second, 1 thread", ours["decode"], theirs["decode"], decode_goal, operator.ge)
        print(f"      {share:.0%} of the read bandwidth (file size times speed)")
        _row("prompt 512, tokens per CPU second, 1 thread", ours["prompt"], theirs["prompt"], prompt_goal, operator.ge)
    if "load".startswith(arguments.only) or arguments.only in "load":
        ratios = under_load(engines, source, arguments.rounds)
        print(f"load: decoding with 2 threads over 1 thread, beside {COMPETITORS} processes that compute (wall)")
        met = "ok" if ratios["atlas"] >= LOAD_GOAL else "MISSED"
        print(f"    atlas {ratios['atlas']:.2f}  goal {LOAD_GOAL:.2f}  {met}; peer {ratios['peer']:.2f}")
    if arguments.only in "start":
        found_starts = starts(engines, source, arguments.rounds)
        print("start: seconds from the file to the first token")
        _row("imports excluded", found_starts["atlas"][0], found_starts["peer"][0], 0.5, operator.le)
        _row("whole process", found_starts["atlas"][1], found_starts["peer"][1], 0.5, operator.le)


if __name__ == "__main__":
    main()
