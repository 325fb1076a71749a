"""One engine's part of ``cpu_vs_llama_cpp.py``: Atlas, in a process of its own. Prints one JSON object a line."""

import gc
import json
import resource
import sys
import time

ENTERED = time.perf_counter()
gc.disable()  # until the first token, as the engine's process does

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

from atlas_core.assembly.engine import Built, Ledger, build  # noqa: E402
from atlas_core.assembly.environment import discover_plugins, start_folder  # noqa: E402
from atlas_core.engine.runner import Runner  # noqa: E402
from atlas_core.scheduler.scheduler import Scheduler  # noqa: E402
from atlas_core.settings import read_settings  # noqa: E402
from atlas_core.vocab.messages import Generate  # noqa: E402
from atlas_core.vocab.sampling import SamplingParams  # noqa: E402

IMPORTED = time.perf_counter()


def cpu_seconds() -> float:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Session:
    """A loaded model. Steps go through scheduler and runner, sampling included; texts are not made."""

    def __init__(self, model: str, threads: int, numerics: str) -> None:
        flags = {
            "model": model, "hardware": "cpu", "threads": str(threads), "numerics": numerics, "max_batch_size": "1",
            "max_seq_len": "1024", "max_prefill_tokens": "512",
        }  # fmt: skip
        self.ledger = Ledger(lambda progress: None)
        settings = read_settings(flags, {})
        self.built: Built = build(settings, discover_plugins(settings), self.ledger, folder=start_folder(settings))
        assert isinstance(self.built.runner, Runner)
        self.runner = self.built.runner

    def run(self, prompt: list[int], tokens: int) -> list[tuple[float, float]]:
        """(CPU seconds, wall seconds) of each step: the prompt, then ``tokens`` tokens after its first."""
        scheduler = Scheduler(self.built.limits)
        request = Generate("bench", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=tokens + 1))
        scheduler.submit(request, seed=0, stop_ids=())
        times: list[tuple[float, float]] = []
        while (plan := scheduler.schedule()) is not None and len(times) <= tokens:
            cpu, wall = cpu_seconds(), time.perf_counter()
            result = self.runner.collect(self.runner.launch(plan))
            times.append((cpu_seconds() - cpu, time.perf_counter() - wall))
            scheduler.complete(plan, result.sampled)
        return times

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """float32 [vocabulary] after a prompt."""
        scheduler = Scheduler(self.built.limits)
        scheduler.submit(
            Generate("logits", tuple(tokens), SamplingParams(temperature=0.0, max_tokens=1)), seed=0, stop_ids=()
        )
        plan = scheduler.schedule()
        assert plan is not None
        ticket = self.runner.launch(plan)
        found = self.runner.read_logits(ticket)
        self.runner.collect(ticket)
        first: npt.NDArray[np.float32] = found[0]
        return first

    def describe(self) -> str:
        """What runs."""
        return f"atlas {self.built.machine.arch}, numerics {self.built.plan.settings.numerics}"


def main() -> None:
    """Arguments: model, threads, numerics; then one JSON request a line on standard input, one answer a line."""
    began = time.perf_counter()
    session = Session(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    session.run([1, 2, 3, 4, 5, 6, 7, 8], 0)
    first = {
        "imports": IMPORTED - ENTERED, "first_token": time.perf_counter() - began, "flags": session.describe(),
        "phases": {entry.phase: round(entry.seconds, 3) for entry in session.ledger.entries},
    }  # fmt: skip
    print(json.dumps(first), flush=True)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        request = json.loads(line)
        if request["what"] == "logits":
            np.save(request["to"], np.stack([session.logits(tokens) for tokens in request["prompts"]]))
            print(json.dumps({}), flush=True)
        else:
            print(json.dumps(session.run(request["prompt"], request["tokens"])), flush=True)


if __name__ == "__main__":
    main()
