"""Hundreds of streams at once against the same requests one by one: greedy tokens, cancelled streams, steps that mix both phases.

    atlas serve MODEL --hardware hopper --max-queue 512 ... & python bench/gpu/many_streams.py http://127.0.0.1:8888 [--streams 300]

Prompts are token ids of 3 to 200 tokens, and arrive spread over a while, so that prompts are read beside sequences that decode. Every fifth
stream is cut off by its client behind a few tokens. What the others receive must be what each of them received alone. Sums of 16-bit
products are not the same in every batch, so a stream may leave that path where the two best tokens are closer than ``TIE``: it is then counted, and
compared no further. Exits 1 when one differs elsewhere, or when the server still holds requests at the end.
"""

import argparse
import asyncio
import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TIE = 0.1
"""Difference of log-probabilities below which the order of two tokens is rounding."""
CUT = 5
"""Every so many streams are cut off, behind as many tokens."""
WAIT = 120.0


@dataclass(slots=True)
class Stream:
    """Tokens as text, and by how much each led the second best."""

    tokens: list[str] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    first: float = 0.0


async def ask(host: str, port: int, body: Mapping[str, Any], cut: int | None = None) -> Stream:
    """One streamed completion; behind ``cut`` tokens the connection is closed. Raises RuntimeError with an answer that is no stream."""
    reader, writer = await asyncio.open_connection(host, port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    stream, status = Stream(), (await reader.readline()).decode()
    if " 200 " not in status:
        raise RuntimeError(status + (await reader.read()).decode())
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:]).get("choices", ()):
            found = choice.get("logprobs") or {"tokens": [], "top_logprobs": []}
            stream.first = stream.first or time.perf_counter()
            for token, best in zip(found["tokens"], found["top_logprobs"], strict=True):
                high = sorted(best.values(), reverse=True)
                stream.tokens.append(token)
                stream.leads.append(high[0] - high[1] if len(high) > 1 else 0.0)
        if cut is not None and len(stream.tokens) >= cut:
            break
    writer.close()
    return stream


def requests(count: int, vocabulary: int, tokens: int) -> list[dict[str, Any]]:
    """Bodies of greedy requests, the same at every call."""
    rng = np.random.default_rng(7)
    return [
        {
            "prompt": rng.integers(3, vocabulary, rng.integers(3, 200)).tolist(), "max_tokens": tokens,
            "temperature": 0, "stream": True, "logprobs": 2,
        }
        for _ in range(count)
    ]  # fmt: skip


async def together(host: str, port: int, bodies: list[dict[str, Any]], over: float) -> list[Stream]:
    """All of them, begun within ``over`` seconds."""

    async def later(index: int) -> Stream:
        await asyncio.sleep(over * index / len(bodies))
        return await ask(host, port, bodies[index], CUT if index % CUT == 0 else None)

    return list(await asyncio.gather(*(later(index) for index in range(len(bodies)))))


def compared(alone: Stream, beside: Stream, cut: int | None) -> tuple[bool, int, float]:
    """(equal but for ties, where they part or -1, the lead there)."""
    for at, (one, other) in enumerate(zip(alone.tokens[:cut], beside.tokens, strict=False)):
        if one != other:
            return alone.leads[at] < TIE, at, alone.leads[at]
    return cut is not None or len(alone.tokens) == len(beside.tokens), -1, 0.0


def until_ready(base: str) -> None:
    """Return when /health is 200. Raises OSError when it is not within ``WAIT``."""
    began = time.perf_counter()
    while True:
        try:
            urllib.request.urlopen(f"{base}/health", timeout=WAIT).close()
            break
        except OSError:
            if time.perf_counter() - began > WAIT:
                raise
            time.sleep(0.2)


def held_requests(base: str) -> float:
    """Requests that run or wait, by the server's metrics."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=WAIT) as answer:
        lines = answer.read().decode().splitlines()
    names = ("atlas_requests_running", "atlas_requests_waiting")
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names)]
    if not found:
        raise SystemExit("the server's metrics do not tell how many requests it holds")
    return sum(found)


def main() -> int:
    """Ask, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=500)
    parser.add_argument("--over", type=float, default=0.5, help="seconds within which all begin")
    asked = parser.parse_args()
    where = urllib.parse.urlsplit(asked.base)
    host, port = where.hostname or "127.0.0.1", where.port or 80
    bodies = requests(asked.streams, asked.vocabulary, asked.tokens)

    async def one_by_one() -> list[Stream]:
        return [await ask(host, port, body) for body in bodies]

    until_ready(asked.base)
    began = time.perf_counter()
    alone = asyncio.run(one_by_one())
    between = time.perf_counter()
    beside = asyncio.run(together(host, port, bodies, asked.over))
    ended = time.perf_counter()
    print(f"{asked.streams} streams: one by one {between - began:.2f} s, at once {ended - between:.2f} s")
    bad = parted = 0
    for index, (one, other) in enumerate(zip(alone, beside, strict=True)):
        same, at, lead = compared(one, other, CUT if index % CUT == 0 else None)
        parted += at >= 0
        if not same:
            bad += 1
            print(f"stream {index} (prompt of {len(bodies[index]['prompt'])}) parts at token {at}, lead {lead:.3f}: "
                  f"{one.tokens[max(at, 0):][:3]} alone, {other.tokens[max(at, 0):][:3]} beside; lengths {len(one.tokens)}, {len(other.tokens)}")  # fmt: skip
    time.sleep(1)
    left = held_requests(asked.base)
    print(f"{asked.streams - parted} equal, {parted - bad} part at ties, {bad} differ; requests still held: {left:.0f}")
    return 0 if bad == 0 and left == 0 and all(s.tokens for s in beside) else 1


if __name__ == "__main__":
    sys.exit(main())
