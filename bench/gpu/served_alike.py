"""What a GPU serves against what the CPU's exact numerics serve: the same requests of every kind over HTTP, then a soak of the GPU's server.

    python bench/gpu/served_alike.py MODEL [--hardware hopper] [--seconds 6]

Both servers read the same checkpoint, its weights in the same 16 bits; the GPU computes in these, the CPU in float32. Log-probabilities may be
--mean off on average and --apart at most (a router that changes its mind, or a recurrent state, makes single ones much worse). Greedy answers (plain, with a logit bias, with additive penalties, to a stop string) must be equal until the CPU's
own lead over what the GPU chose is below twice that: what parts there is counted, and compared no further. Where a lead cannot be told from
outside (repetition penalties, temperature, n answers, grammars) so many of all answers must be equal as --alike says; what ended within a
grammar follows it. Streamed and whole answers of the GPU are equal, but for n of them, which share steps. All of these find nothing in the prefix cache; those of the soak do.

The soak: clients of all kinds at once for a while, a fourth of which goes away in the middle. Then nothing may be left: no sequence, no page,
and the first request's answer is what it was. Exits 1 when anything is not so.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 32
BAD_LEAD = float("inf")
WAIT = 60.0
KINDS = ["lamp", "lighthouse", "lantern"]
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": KINDS},
        "digits": {"type": "array", "items": {"enum": [0, 1, 2, 3]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["ok", "kind", "digits"],
    "additionalProperties": False,
}
REGEX = r"\{(ok|no):(lamp|lighthouse|lantern),[0-3]{3,9}\}"
Body = dict[str, Any]


@dataclass
class Answer:
    """One choice: text, why it ended, tokens with their best alternatives where they were asked for."""

    text: str = ""
    finish: str = ""
    tokens: list[str] = field(default_factory=list)
    best: list[dict[str, float]] = field(default_factory=list)


class Server:
    """One of the two."""

    def __init__(self, folder: Path, model: str, *flags: str) -> None:
        self.log = folder / f"{'-'.join(flags).replace('/', '')[:40]}.log"
        command = [
            sys.executable,
            "-m",
            "atlas_core",
            "serve",
            model,
            "--port",
            "0",
            "--max-seq-len",
            "512",
            "--memory",
            "1GiB",
            *flags,
        ]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=dict(os.environ))
        ended = time.monotonic() + WAIT
        while not (found := re.search(r"^ready: http://([^:]+):(\d+)/v1", self.log.read_text(), re.MULTILINE)):
            if self.process.poll() is not None or time.monotonic() > ended:
                self.process.kill()
                raise SystemExit(f"no server: {self.log.read_text()}")
            time.sleep(0.05)
        self.host, self.port, self.salts = found[1], int(found[2]), count()

    async def send(self, method: str, path: str, body: Body | None = None, *, cut: int = 0) -> tuple[int, list[bytes]]:
        """(status, lines of the body); behind ``cut`` lines of a stream the connection is closed."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        raw = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        lines: list[bytes] = []
        async for line in reader:
            lines.append(line.strip())
            if cut and len(lines) >= cut:
                break
        writer.close()
        return status, lines

    async def ask(self, body: Body) -> list[Answer]:
        """Every choice of a completion. Raises RuntimeError where it is refused."""
        status, lines = await self.send("POST", "/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"{status}: {b''.join(lines).decode()[:500]}")
        events = (
            [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
            if body.get("stream")
            else [json.loads(b"".join(line for line in lines if line.startswith(b"{")))]
        )
        answers = [Answer() for _ in range(body.get("n", 1))]
        for event in events:
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for choice in event["choices"]:
                answer = answers[choice["index"]]
                answer.text += choice["text"]
                answer.finish = choice["finish_reason"] or answer.finish
                found = choice.get("logprobs") or {"tokens": [], "top_logprobs": []}
                answer.tokens += found["tokens"]
                answer.best += found["top_logprobs"] or []
        return answers

    def all(self, bodies: Sequence[Body]) -> list[list[Answer]]:
        """One after the other, none of which finds anything of another's prompt."""
        salted = [body | {"cache_salt": f"{next(self.salts)}"} for body in bodies]

        async def run() -> list[list[Answer]]:
            return [await self.ask(body) for body in salted]

        return asyncio.run(run())

    def gauges(self) -> dict[str, float]:
        """Its metrics without labels."""
        _, lines = asyncio.run(self.send("GET", "/metrics"))
        pairs = (line.decode().split(" ") for line in lines if re.match(rb"^[a-z_]+ [-+0-9.e]+$", line))
        return {name: float(value) for name, value in pairs}

    def stop(self) -> None:
        """In good order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT)


def penalised(best: Mapping[str, float], before: Sequence[str], body: Body) -> dict[str, float]:
    """Log-probabilities as they are compared behind additive penalties, but for a constant."""
    presence, frequency = body.get("presence_penalty", 0.0), body.get("frequency_penalty", 0.0)
    return {
        token: value - presence * (token in before) - frequency * before.count(token) for token, value in best.items()
    }


def parted(cpu: Answer, gpu: Answer, body: Body) -> tuple[int, float]:
    """Where two answers part (-1: nowhere) and by how much the CPU preferred its own token."""
    for at, (one, other) in enumerate(zip(cpu.tokens, gpu.tokens, strict=False)):
        if one != other:
            values = penalised(cpu.best[at], cpu.tokens[:at], body)
            return at, values[one] - values.get(
                other, min(values.values())
            )  # at least, where the other is not among them
    same = len(cpu.tokens) == len(gpu.tokens) and (cpu.text, cpu.finish) == (gpu.text, gpu.finish)
    return (-1, 0.0) if same else (min(len(cpu.tokens), len(gpu.tokens)), BAD_LEAD)


def valid(name: str, answer: Answer) -> bool:
    """Whether it follows SCHEMA or REGEX; between the parts of JSON there may be white space without end, so that some have none."""
    text = answer.text
    if name == "regular expression":
        return re.fullmatch(REGEX, text) is not None
    if answer.finish != "stop":
        return text.lstrip().startswith("{")
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        set(found) == {"ok", "kind", "digits"} and isinstance(found["ok"], bool) and found["kind"] in KINDS
        and 2 <= len(found["digits"]) <= 4 and set(found["digits"]) <= {0, 1, 2, 3}
    )  # fmt: skip


def kinds(vocabulary: int, many: int) -> dict[str, tuple[bool, list[Body]]]:
    """By name, whether leads can be told, and the requests."""
    draw = np.random.default_rng(11)

    def bodies(**more: Any) -> list[Body]:
        return [
            {
                "prompt": [int(t) for t in draw.integers(3, vocabulary, draw.integers(3, 150))],
                "max_tokens": TOKENS,
                "temperature": 0,
            }
            | more
            for _ in range(many)
        ]

    return {
        "greedy": (True, bodies(logprobs=5)),
        "logit bias": (True, bodies(logprobs=5, logit_bias={str(t): -100 for t in range(40, 60)})),
        "presence, frequency": (True, bodies(logprobs=5, presence_penalty=0.05, frequency_penalty=0.02)),
        "repetition": (False, bodies(repetition_penalty=1.2)),
        "sampled, n = 4": (False, bodies(temperature=0.8, seed=5, n=4)),
        "top k, top p, min p": (False, bodies(temperature=1.1, seed=6, top_k=50, top_p=0.9, min_p=0.01)),
        "JSON schema": (False, bodies(structured_outputs={"json": SCHEMA}, max_tokens=200)),
        "regular expression": (False, bodies(structured_outputs={"regex": REGEX}, max_tokens=200)),
    }


def compared(cpu: Server, gpu: Server, asked: argparse.Namespace) -> tuple[list[str], list[Body]]:
    """What is wrong, and all requests."""
    tie = 2 * asked.apart
    wrong: list[str] = []
    everything: list[Body] = []
    for name, (told, made) in kinds(asked.vocabulary, asked.count).items():
        bodies = made
        want, got = cpu.all(bodies), gpu.all(bodies)
        if name == "greedy":  # and each to a text in the middle of its own answer
            stops = [
                body | {"stop": [answers[0].text[20:26]]}
                for body, answers in zip(bodies, want, strict=True)
                if answers[0].text[20:26].strip()
            ]
            want, got, bodies = [*want, *cpu.all(stops)], [*got, *gpu.all(stops)], [*bodies, *stops]
        streamed = gpu.all([body | {"stream": True} for body in bodies])
        everything += bodies
        pairs = [
            (c, g, s, body)
            for cs, gs, ss, body in zip(want, got, streamed, bodies, strict=True)
            for c, g, s in zip(cs, gs, ss, strict=True)
        ]
        equal = sum((c.text, c.finish) == (g.text, g.finish) for c, g, _, _ in pairs)
        # Of n answers some may share a step with others or not, as they happen to arrive.
        unlike = sum((g.text, g.finish) != (s.text, s.finish) for _, g, s, _ in pairs)
        if unlike > ("n" in bodies[0]) * (1 - asked.alike) * len(pairs):
            wrong.append(f"{name}: {unlike} streamed answers are not what is answered whole")
        leads = [parted(c, g, body) for c, g, _, body in pairs] if told else []
        bad = [lead for at, lead in leads if at >= 0 and not lead < tie]
        distances = [
            abs(c.best[at][token] - g.best[at][token])
            for c, g, _, _ in pairs
            for at in range(min(len(c.best), len(g.best)))
            if c.tokens[:at] == g.tokens[:at]
            for token in c.best[at]
            if token in g.best[at]
        ] or [0.0]
        largest, mean = max(distances), float(np.mean(distances))
        print(f"{name:<22} {equal} of {len(pairs)} equal" + (f", {sum(at >= 0 for at, _ in leads) - len(bad)} part at ties, {len(bad)} elsewhere; "
              f"log-probabilities {mean:.4f} apart, {largest:.4f} at most" if told else ""), flush=True)  # fmt: skip
        wrong += [f"{name}: {len(bad)} answers part where there is no tie: leads {sorted(bad)[:5]}"] if bad else []
        wrong += (
            [f"{name}: only {equal} of {len(pairs)} are equal"] if not told and equal < asked.alike * len(pairs) else []
        )
        if largest > asked.apart or mean > asked.mean:
            wrong.append(f"{name}: log-probabilities are {mean:.4f} off, {largest:.4f} at most")
        if "structured_outputs" in bodies[0]:
            ends = [a for group in (*want, *got) for a in group]
            broken = [a.text for a in ends if not valid(name, a)]
            wrong += [f"{name}: {len(broken)} answers break it: {broken[:2]}"] if broken else []
    return wrong, everything


def soaked(gpu: Server, bodies: list[Body], asked: argparse.Namespace) -> list[str]:
    """All kinds at once, some cut off; what is wrong afterwards."""
    first = gpu.all(bodies[:1])
    counts = {"whole": 0, "cut": 0}
    wrong: list[str] = []
    draw = np.random.default_rng(12)

    async def client(end: float) -> None:
        while time.monotonic() < end:
            body = bodies[int(draw.integers(len(bodies)))] | {"stream": True}
            cut = int(draw.integers(2, 20)) if draw.random() < 0.25 else 0
            status, lines = await gpu.send("POST", "/v1/completions", body, cut=cut)
            done = cut or (lines and b"data: [DONE]" in lines and not any(b'"error"' in line for line in lines))
            counts["cut" if cut else "whole"] += 1
            if status != 200 or not done:
                wrong.append(f"a request ended with {status}: {lines[-2:]}")

    async def everybody() -> None:
        end = time.monotonic() + asked.seconds
        await asyncio.gather(*(client(end) for _ in range(asked.clients)))

    asyncio.run(everybody())
    until = time.monotonic() + 10
    names = ("atlas_sequences_inside", "atlas_requests_running", "atlas_requests_waiting", "atlas_kv_tokens_used")
    left: dict[str, float] = {}
    while time.monotonic() < until:
        again = gpu.all(bodies[:1])  # gauges come with steps
        gauges = gpu.gauges()
        left = {name: gauges[name] for name in names if gauges[name]}
        if not left:
            break
        time.sleep(0.1)
    print(f"soak: {counts['whole']} answers to the end, {counts['cut']} cut off, {len(wrong)} lost; left behind: {left or 'nothing'}; "
          f"{gauges['atlas_preemptions_total']:.0f} put back, {gauges['atlas_kv_tokens_evicted_total']:.0f} tokens given away")  # fmt: skip
    wrong += [f"something is left: {left}"] if left else []
    at, lead = parted(first[0][0], again[0][0], bodies[0])
    wrong += (
        [f"the first request is answered otherwise at token {at}, lead {lead}"]
        if at >= 0 and not lead < 2 * asked.apart
        else []
    )
    return wrong[:10]


def main() -> int:
    """Both servers, every kind, the soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--hardware", default="hopper")
    parser.add_argument("--dtype", default="f16")
    parser.add_argument("--vocabulary", type=int, default=490)
    parser.add_argument("--count", type=int, default=24, help="requests of each kind")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--mean", type=float, default=0.01, help="most that log-probabilities may be off on average")
    parser.add_argument("--apart", type=float, default=0.02, help="most that a log-probability may be off")
    parser.add_argument("--alike", type=float, default=0.8, help="share of answers that must be equal")
    asked = parser.parse_args()
    there = ["--dtype", asked.dtype] if asked.hardware != "cpu" else []
    rounded = ["--transcode", asked.dtype]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cpu = Server(folder, asked.model, "--hardware", "cpu", "--numerics", "exact", *rounded)
        gpu = Server(folder, asked.model, "--hardware", asked.hardware, *there, *rounded, "--max-queue", "256")
        stop: list[Callable[[], None]] = [cpu.stop, gpu.stop]
        try:
            wrong, bodies = compared(cpu, gpu, asked)
            wrong += soaked(gpu, bodies, asked)
            if re.search(r"Traceback|ERROR| E the engine", gpu.log.read_text()):
                wrong.append(f"the log has errors: {gpu.log.read_text()[-1500:]}")
        finally:
            for end in stop:
                end()
    print("\n".join(f"WRONG: {text}" for text in wrong) or "as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
