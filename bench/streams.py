"""What the server adds to the engine: latency and CPU time of a token, in many streams at once.

    python bench/streams.py [--streams 64] [--rate 2000] [--tokens 300]

An engine whose device only takes its time makes ``rate`` tokens a second in all streams together; every token's text is the moment
at which the engine made it. First the engine's loop alone, in this process, then the whole server over it: API process, engine
process, HTTP and this client, on the same machine. The latency of a token is the time from then until this client has read its bytes,
and until the kernel had them for it; what the loop alone takes is subtracted. The goals are the server's, which is done when the bytes have
arrived: when this client gets to them, on the same cores, is printed beside it. CPU times are user and system time from /proc.
"""

import argparse
import json
import os
import re
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from streaming.engine import STAMP, engine

from atlas_core.engine.loop import Closed, Inbox
from atlas_core.vocab.messages import FromEngine, Generate, StepResult
from atlas_core.vocab.sampling import SamplingParams

GOALS = {"p50": 1.0, "p99": 8.0, "cpu": 60.0}
"""Milliseconds, milliseconds, microseconds."""
PIECE = 1 << 13
"""Bytes of a read: many times what one write brings."""
SO_TIMESTAMPNS = 35
"""asm-generic/socket.h; Python's socket module has no name for it."""
GLANCE = 0.0002
"""Seconds between looks at the sockets: woken by every write, a client on the same machine makes each one dear for the server."""
SETTLING = 20
"""Tokens of each stream that are not counted: all streams have begun by then."""
_STAMP = re.compile(rf'"content":"((?:[0-9a-f]{{{STAMP}}})+)"'.encode())
_TIMESPEC = struct.Struct("qq")
_TICK = os.sysconf("SC_CLK_TCK")


def bare(streams: int, rate: float, tokens: int) -> list[float]:
    """Milliseconds from each token to the step's result, in the loop alone."""
    inbox: Inbox = SimpleQueue()
    late: list[float] = []
    running = set(map(str, range(streams)))

    def emit(result: FromEngine) -> None:
        now = time.monotonic_ns()
        assert isinstance(result, StepResult)
        for delta in result.deltas:
            if delta.completion_tokens > SETTLING:
                late.append((now - int(delta.text, 16)) / 1e6)
            if delta.finish is not None:
                running.discard(delta.id)
        if not running:
            inbox.put(Closed())

    for name in sorted(running):
        inbox.put(Generate(name, (1, 2, 3), SamplingParams(max_tokens=tokens)))
    engine(streams, rate).run(inbox, emit)
    return late


@contextmanager
def server(streams: int, rate: float, *, apart: bool) -> Iterator[tuple[str, int, int]]:
    """(URL, number of the API process, number of the engine process) of a server over a paced engine; ``apart``, on a core each."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "streaming.serve", json.dumps({"streams": streams, "rate": rate})]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if apart:
                # Some kernels of virtual machines pack what runs on few cores: the server would wait behind the engine, beside an idle one.
                first, *_, last = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(int(child), {last})
                os.sched_setaffinity(process.pid, {first})
            yield url, process.pid, int(child)
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def measured(
    url: str, streams: int, tokens: int, processes: Sequence[int]
) -> tuple[list[float], list[float], list[float], int, int]:
    """(milliseconds of each token until it was read, until it had arrived, CPU seconds of each process, tokens in that time, pieces that they came in)."""
    address = urlsplit(url)
    body = json.dumps({"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ready = select.epoll()
    clients: dict[int, tuple[socket.socket, list[tuple[int, int, bytes]]]] = {}
    for _ in range(streams):
        connection = socket.create_connection((address.hostname, address.port))
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        connection.sendall(head.encode() + body)
        ready.register(connection, select.EPOLLIN)
        clients[connection.fileno()] = connection, []
    first = 0
    began = [0.0] * len(processes)
    read: list[list[tuple[int, int, bytes]]] = []
    since = time.time_ns() - time.monotonic_ns()
    while clients:
        time.sleep(GLANCE)
        for number, _ in ready.poll():
            connection, pieces = clients[number]
            data, extra, _, _ = connection.recvmsg(PIECE, 64)
            pieces.append((time.monotonic_ns(), arrival(extra, since), data))
            if not first and len(pieces) > SETTLING:
                first = time.monotonic_ns()
                began = [cpu_seconds(pid) for pid in processes]
            if len(pieces) == 1 and not data.startswith(b"HTTP/1.1 200 "):
                raise SystemExit(f"the server answered {data[:500]!r}")
            if data.endswith(b"0\r\n\r\n") or not data:
                connection.close()  # which takes it out of the set, too
                del clients[number]
                read.append(pieces)
    used = [cpu_seconds(pid) - start for pid, start in zip(processes, began, strict=True)]
    late, there, counted, writes = [], [], 0, 0
    for pieces in read:
        number = 0
        for now, came, data in pieces:
            texts = b"".join(_STAMP.findall(data))
            stamps = [int(texts[at : at + STAMP], 16) for at in range(0, len(texts), STAMP)]
            wanted = [stamp for index, stamp in enumerate(stamps, number) if index >= SETTLING]
            late += [(now - stamp) / 1e6 for stamp in wanted]
            there += [(came - stamp) / 1e6 for stamp in wanted]
            number += len(stamps)
            counted += sum(stamp >= first for stamp in stamps)
            writes += bool(stamps)
        assert number == tokens, f"a stream has {number} tokens instead of {tokens}"
    return late, there, used, counted, writes


def arrival(extra: Sequence[tuple[int, int, bytes]], since: int) -> int:
    """Monotonic nanoseconds at which the kernel had what was read; ``since`` is the monotonic clock's zero in Unix time."""
    for _, _, data in extra:
        seconds, nanoseconds = _TIMESPEC.unpack(data[: _TIMESPEC.size])
        return int(seconds) * 1_000_000_000 + int(nanoseconds) - since
    return time.monotonic_ns()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50 and p99."""
    cuts = statistics.quantiles(values, n=100)
    return {"p50": cuts[49], "p99": cuts[98]}


def main() -> int:
    """See the module's docstring. Ends with 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument(
        "--together", action="store_true", help="leave it to the kernel which core each process runs on"
    )
    given = parser.parse_args()
    loop = percentiles(bare(given.streams, given.rate, min(given.tokens, 100)))
    apart = not given.together and len(os.sched_getaffinity(0)) > 1
    with server(given.streams, given.rate, apart=apart) as (url, api, child):
        late, there, used, counted, writes = measured(url, given.streams, given.tokens, (api, child))
    whole, arrived = percentiles(late), percentiles(there)
    load = os.getloadavg()[0]
    print(
        f"{given.streams} streams, {given.rate:g} tokens/s in all, {os.cpu_count()} CPUs{', engine and server on one each' * apart}, load {load:.1f}; {writes} writes for {len(late)} tokens"
    )
    found: dict[str, Any] = {name: arrived[name] - loop[name] for name in arrived}
    found["cpu"] = used[0] / counted * 1e6
    for name in whole:
        print(
            f"{name}: {arrived[name]:.2f} ms a token, the loop alone {loop[name]:.2f}: added {found[name]:.2f} ms (goal {GOALS[name]:g}); "
            f"read by the client after {whole[name]:.2f}, added {whole[name] - loop[name]:.2f}"
        )
    print(
        f"CPU of the API process: {found['cpu']:.1f} µs a token (goal {GOALS['cpu']:g}); of the engine: {used[1] / counted * 1e6:.1f}"
    )
    return int(any(found[name] > goal for name, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
