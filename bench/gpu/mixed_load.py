"""A long prompt that arrives while others decode: what it costs them, and what they cost it.

    atlas serve MODEL --hardware hopper --load-format dummy ... & python bench/gpu/mixed_load.py http://127.0.0.1:8888

Clients hold streams of completions whose prompts differ; then prompts of the given length come, one after another. Times are those at which
events reach the client's process. Printed are the time to first token of the long prompt alone and beside the streams, the median pause between
tokens without and with long prompts, and its 99th percentile: of all pauses from as long before the first prompt as all of them take to
the end of the streams, and, more severe, of those up to the last answer.
"""

import argparse
import json
import random
import selectors
import socket
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from urllib.parse import urlsplit

from over_http import WAIT, get

VOCABULARY, SETTLING, SETTLED = 32000, 150, 60
"""Ids of prompts; tokens of each stream before anything counts, and those at its beginning that never do."""
SOLO = 4
"""Prompts that are read alone, after one another."""
EVENT = b"data: {"
NEAR = 0.06
"""Seconds behind an arrival in which the server has most to do with it."""
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
GOALS = {"p99 / p50": 2.5, "p50 / p50 alone": 1.15, "speed of the prompt": 0.7}


class Stream:
    """One greedy completion that does not end early, as it arrives."""

    def __init__(self, host: str, port: int, request: bytes) -> None:
        self.arrived: list[tuple[float, bytes]] = []
        self.events, self.ended = 0, False
        self.asked = time.perf_counter()
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(request)

    def receive(self) -> None:
        """Keep what there is, with the time; what it means is looked at later."""
        data = self.socket.recv(1 << 16)
        self.arrived.append((time.perf_counter(), data))
        self.events += data.count(EVENT)
        self.ended = not data

    def times(self) -> list[float]:
        """When each event had begun to arrive. Raises SystemExit when one is an error."""
        whole = b"".join(data for _, data in self.arrived)
        if b'"error"' in whole or not whole.startswith(b"HTTP/1.1 200"):
            raise SystemExit(whole[-500:].decode(errors="replace"))
        ends = [*accumulate(len(data) for _, data in self.arrived)]
        found, at = [], whole.find(EVENT)
        while at >= 0:
            found.append(self.arrived[bisect_right(ends, at)][0])
            at = whole.find(EVENT, at + 1)
        return found


class Clients:
    """All streams of this process, read by one thread, so that none waits for another's turn to run."""

    def __init__(self, base: str) -> None:
        url = urlsplit(base)
        self._host, self._port = url.hostname or "127.0.0.1", url.port or 80
        self._selector = selectors.DefaultSelector()

    def request(self, seed: int, length: int, tokens: int) -> bytes:
        """A POST whose prompt no other seed has."""
        rng = random.Random(seed)
        ids = [rng.randrange(1000, VOCABULARY) for _ in range(length)]
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def open(self, request: bytes) -> Stream:
        """Ask for a stream."""
        stream = Stream(self._host, self._port, request)
        self._selector.register(stream.socket, selectors.EVENT_READ, stream)
        return stream

    def read(self, until: Callable[[], bool]) -> None:
        """Read whatever arrives, until something is the case."""
        while not until():
            ready = self._selector.select(WAIT)
            if not ready:
                raise SystemExit(f"nothing arrived for {WAIT:.0f} s")
            for key, _ in ready:
                key.data.receive()
                if key.data.ended:
                    self._selector.unregister(key.fileobj)
                    key.data.socket.close()

    def first_token(self, request: bytes) -> float:
        """Seconds from a request to its first token, while all others are read as well."""
        stream = self.open(request)
        self.read(lambda: stream.ended or stream.events > 0)
        return stream.times()[0] - stream.asked


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@dataclass(frozen=True, slots=True)
class Round:
    """Pauses between tokens of all streams, in seconds, and seconds to the first tokens of the prompts beside them.

    ``alone`` are pauses before the first prompt came, ``beside`` those from then to the last answer. ``whole`` has these, as long a
    time before them, and all behind them; ``near`` the same up to the last answer, so that half of its time is spent beside prompts.
    """

    alone: list[float]
    beside: list[float]
    whole: list[float]
    near: list[float]
    first: list[float]
    worst: list[float]  # of the pauses just behind each arrival


def play(clients: Clients, options: argparse.Namespace, seed: int) -> Round:
    """Streams that decode, and prompts that come one after another. Raises SystemExit when the streams end too early."""
    # Made beforehand: while this process makes one, it reads none of its streams.
    later = [clients.request(seed + 2000 + i, options.prompt, 1) for i in range(options.arrivals)]
    running = [clients.open(clients.request(seed + i, 256, options.tokens)) for i in range(options.clients)]
    clients.read(lambda: min(stream.events for stream in running) >= SETTLING)
    start = time.perf_counter()
    first, arrivals = [], []
    for request in later:
        arrivals.append(time.perf_counter())
        first.append(clients.first_token(request))
    end = time.perf_counter()
    clients.read(lambda: all(stream.ended for stream in running))
    arrived = [stream.times() for stream in running]
    if max(times[-1] for times in arrived) < end:
        raise SystemExit("the streams ended before the prompts were read: raise --tokens")
    # The first tokens of a stream come while the prompts of others are read.
    pauses = [(later, later - earlier) for times in arrived for earlier, later in pairwise(times[SETTLED:])]
    before = start - (end - start)
    return Round(
        [pause for at, pause in pauses if at < start],
        [pause for at, pause in pauses if start <= at <= end],
        [pause for at, pause in pauses if at >= before],
        [pause for at, pause in pauses if before <= at <= end],
        first,
        [max(pause for at, pause in pauses if arrival <= at <= arrival + NEAR) for arrival in arrivals],
    )


def told(values: Iterable[float], scale: float = 1e3, digits: int = 2) -> str:
    """The values of all rounds, in their order."""
    return ", ".join(f"{value * scale:.{digits}f}" for value in values)


def main() -> int:
    """Measure, print, and exit with 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=700, help="of each stream")
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--arrivals", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of streams and arrivals; what counts is the median of rounds"
    )
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
    clients = Clients(options.base)
    firsts = [clients.first_token(clients.request(1000 + i, options.prompt, 1)) for i in range(SOLO)]
    rounds = [play(clients, options, 10_000 * (index + 1)) for index in range(options.rounds)]
    alone = statistics.median(firsts)
    solo, p50 = ([statistics.median(r.alone) for r in rounds], [statistics.median(r.whole) for r in rounds])
    p99 = [percentile(r.whole, 0.99) for r in rounds]
    found = {
        "p99 / p50": [high / middle for high, middle in zip(p99, p50, strict=True)],
        "p50 / p50 alone": [middle / quiet for middle, quiet in zip(p50, solo, strict=True)],
        "speed of the prompt": [alone / statistics.median(r.first) for r in rounds],
    }
    print(f"a prompt of {options.prompt} alone: first token after {told(firsts, digits=0)} ms")
    for r in rounds:
        print(f"{options.clients} streams alone: p50 {statistics.median(r.alone) * 1e3:.2f} ms, p99 {percentile(r.alone, 0.99) * 1e3:.2f} ms "
              f"between tokens; prompts beside them: {told(r.first, digits=0)} ms")  # fmt: skip
        tenths = ", ".join(f"{s:.0%} {percentile(r.beside, s) * 1e3:.1f}" for s in SHARES)
        print(f"  while prompts are read, up to: {tenths}, longest {max(r.beside) * 1e3:.1f} ms; longest within {NEAR * 1e3:.0f} ms of an "
              f"arrival: {told(r.worst, digits=1)} ms")  # fmt: skip
    near = [percentile(r.near, 0.99) / statistics.median(r.near) for r in rounds]
    print(f"with as long a time before, and all behind: p50 {told(p50)} ms, p99 {told(p99)} ms")
    print(f"the same up to the last answer: p50 {told(statistics.median(r.near) for r in rounds)} ms, "
          f"p99 {told(percentile(r.near, 0.99) for r in rounds)} ms, ratio {told(near, 1)}")  # fmt: skip
    missed = 0
    for name, values in found.items():
        value = statistics.median(values)
        held = value >= GOALS[name] if name == "speed of the prompt" else value <= GOALS[name]
        missed += not held
        print(f"{name}: {value:.2f} ({told(values, 1)}; goal {GOALS[name]}{'' if held else ', missed'})")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
