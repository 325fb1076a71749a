# ruff: noqa: T201, INP001 -- a script that prints
"""A long prompt that arrives while others decode: what it costs them, and what they cost it.

    atlas serve MODEL --hardware hopper --load-format dummy ... & python bench/gpu/mixed_load.py http://127.0.0.1:8888

Clients hold streams of completions whose prompts differ; then prompts of the given length come, one after another. Times are those of
events at the client. Printed are the time to first token of the long prompt alone and beside the streams, the median pause between
tokens without and with long prompts, and its 99th percentile from the arrival of the first to the answer to the last.
"""

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise

from over_http import WAIT, events, get

VOCABULARY, SETTLED = 32000, 60
NEAR = 0.06
"""Seconds behind an arrival in which the server has most to do with it."""
GOALS = {"p99 / p50": 2.5, "p50 / p50 alone": 1.15, "speed of the prompt": 0.7}


def prompt(seed: int, tokens: int) -> list[int]:
    """Ids that no other seed has."""
    rng = random.Random(seed)  # noqa: S311
    return [rng.randrange(1000, VOCABULARY) for _ in range(tokens)]


def stream(base: str, ids: list[int], tokens: int, on_token: Callable[[float], None]) -> None:
    """One greedy completion that does not end early."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    for event in events(f"{base}/v1/completions", body):
        if event.get("error"):
            raise SystemExit(str(event["error"]))
        on_token(time.perf_counter())


def first_token(base: str, ids: list[int]) -> float:
    """Seconds from the request to its first token."""
    began = time.perf_counter()
    times: list[float] = []
    stream(base, ids, 1, times.append)
    return times[0] - began


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main() -> int:
    """Measure, print, and exit with 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=700, help="of each stream")
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--arrivals", type=int, default=3)
    options = parser.parse_args()
    began = time.perf_counter()
    while True:
        try:
            get(f"{options.base}/health")
            break
        except OSError:
            if time.perf_counter() - began > WAIT:
                raise
            time.sleep(0.2)
    alone = statistics.median(first_token(options.base, prompt(1000 + i, options.prompt)) for i in range(4))
    # Made beforehand: while this process makes one, none of its streams reads.
    later = [prompt(2000 + i, options.prompt) for i in range(options.arrivals)]
    arrived: list[list[float]] = [[] for _ in range(options.clients)]
    clients = [
        threading.Thread(target=stream, args=(options.base, prompt(i, 256), options.tokens, arrived[i].append))
        for i in range(options.clients)
    ]
    for client in clients:
        client.start()
    while min(map(len, arrived)) < 150:
        time.sleep(0.02)
    start = time.perf_counter()
    beside, arrivals = [], []
    for ids in later:
        arrivals.append(time.perf_counter())
        beside.append(first_token(options.base, ids))
    end = time.perf_counter()
    for client in clients:
        client.join()
    # The first tokens of a stream come while the prompts of others are read.
    pauses = [(later, later - earlier) for times in arrived for earlier, later in pairwise(times[SETTLED:])]
    quiet = [pause for at, pause in pauses if at < start]
    mixed = [pause for at, pause in pauses if start <= at <= end]
    whole = [pause for at, pause in pauses if at >= start - (end - start)]
    if max(t[-1] for t in arrived) < end:
        raise SystemExit("the streams ended before the prompts were read: raise --tokens")
    solo, p50, p99 = statistics.median(quiet), statistics.median(whole), percentile(whole, 0.99)
    found = {
        "p99 / p50": p99 / p50,
        "p50 / p50 alone": p50 / solo,
        "speed of the prompt": alone / statistics.median(beside),
    }
    print(
        f"{options.clients} streams alone: p50 {solo * 1e3:.2f} ms, p99 {percentile(quiet, 0.99) * 1e3:.2f} ms between tokens"
    )
    print(
        f"a prompt of {options.prompt}: first token after {alone * 1e3:.0f} ms alone, {statistics.median(beside) * 1e3:.0f} ms beside them"
    )
    print(f"while prompts are read: p50 {statistics.median(mixed) * 1e3:.2f} ms, p99 {percentile(mixed, 0.99) * 1e3:.2f} ms, "
          f"longest {max(mixed) * 1e3:.1f} ms")  # fmt: skip
    tenths = ", ".join(
        f"{share:.0%} {percentile(mixed, share) * 1e3:.1f}" for share in (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
    )
    first = [max(pause for at, pause in pauses if arrival <= at <= arrival + NEAR) for arrival in arrivals]
    print(f"of these, up to: {tenths} ms; longest within {NEAR * 1e3:.0f} ms of an arrival: "
          f"{', '.join(f'{pause * 1e3:.1f}' for pause in first)} ms")  # fmt: skip
    print(f"with as long a time before: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms")
    missed = 0
    for name, value in found.items():
        held = value >= GOALS[name] if name == "speed of the prompt" else value <= GOALS[name]
        missed += not held
        print(f"{name}: {value:.2f} (goal {GOALS[name]}{'' if held else ', missed'})")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
