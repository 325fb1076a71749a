"""Requests and answers a little way off from good ones, through the whole application without its socket.

Every request must end in a status that the API document has for it, and none in a 500: a RequestError is the only exception that
a translation may raise. Answers are mutated fixtures of tool calls and thoughts; what their readers make of them must not depend on
the pieces in which they come. Run by ``make fuzz``: ``python tests/fuzz/translation.py SECONDS [SEED]``.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutation import cut, mutated, mutated_bytes, mutated_text
from seeds import SEEDS
from server_kit import kit

from atlas_core.contracts.dialect import Text, Tool
from atlas_core.plugins import discover
from atlas_core.plugins.load import load
from atlas_core.server.answer import AnswerReader, Arguments, Call, Reading, Thought, read_message
from atlas_core.server.app import Application
from atlas_core.server.openapi import document
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import Service

FIXTURES = json.loads((Path(__file__).resolve().parents[1] / "data" / "parser_fixtures.json").read_text())
TOOLS = tuple(Tool(name, schema) for name, schema in FIXTURES["tools"].items())
ANSWERS = [case["text"] for case in (*FIXTURES["parsers"], *FIXTURES["reasoning"])]
BODIES = [body for _, body in SEEDS]
PER_APPLICATION = 200
"""Requests to one application: what is kept and what runs in the background ends with it."""
SLOW_S = 10.0


@dataclass(eq=False)
class Failures(logging.Handler):
    """Defects that the server logged: its answer tells nothing of them."""

    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


def known_dialects() -> dict[str, Any]:
    """Every dialect by its name."""
    return {name: load(found.dialect, "atlas_core")() for name, found in discover().dialects.items()}


@asynccontextmanager
async def running(random: Random, dialects: dict[str, Any]) -> AsyncIterator[Application]:
    """An application whose model speaks a dialect drawn from all of them."""
    tools = random.choice([name for name, dialect in dialects.items() if dialect.tools is not None])
    thoughts = random.choice([name for name, dialect in dialects.items() if dialect.reasoning is not None])
    speech = kit.choose(dialects, "", tools=(tools, ""), reasoning=(thoughts, ""))

    def answer(request: Any) -> list[Any]:
        text = mutated_text(random.choice(ANSWERS), random, ANSWERS)
        return kit.deltas(request, text, chunk=random.randint(1, 8), context=engine.context)

    engine = kit.FakeEngine(answer, context=8192)
    options = ServerOptions(strict_model=random.random() < 0.2, max_body=2**20)

    async def bring_up(on_progress: Any) -> Service:
        return Service(engine, kit.model(speech=speech))

    app = Application(bring_up, options, kit.Recorder())
    async with app.asgi.router.lifespan_context(app.asgi):
        while app.lifecycle.state != "ready":  # noqa: ASYNC110 a turn of the loop or two
            await asyncio.sleep(0)
        yield app


async def ask(app: Application, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of one answer."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"}, "state": {},
    }  # fmt: skip
    await asyncio.wait_for(app.asgi(scope, receive, send), SLOW_S)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def requests(
    random: Random, dialects: dict[str, Any], until: float, failures: Failures, count: dict[int, int]
) -> None:
    """Mutated requests to one application."""
    async with running(random, dialects) as app:
        paths = document(app.table, "1", keyed=False)["paths"]
        for _ in range(PER_APPLICATION):
            if time.monotonic() > until:
                return
            path, good = random.choice(SEEDS)
            off = good if random.random() < 0.05 else mutated(good, random, BODIES)
            body = mutated_bytes(off, random) if random.random() < 0.1 else json.dumps(off).encode()
            status, said = await ask(app, path, body)
            count[status] = count.get(status, 0) + 1
            if failures.found or status >= 500 or str(status) not in paths[path]["post"]["responses"]:
                raise AssertionError(f"POST {path}\n{body!r}\n→ {status} {said[:2000]!r}\n" + "\n".join(failures.found))


def readers(random: Random, dialects: dict[str, Any]) -> None:
    """One mutated answer, read by one dialect: whole, and in pieces."""
    dialect = random.choice(list(dialects.values()))
    reading = Reading(TOOLS, dialect.tools, dialect.reasoning, random.random() < 0.8)
    text = mutated_text(random.choice(ANSWERS), random, ANSWERS)
    opening = random.choice(("open", "closed", "unsaid")) if dialect.reasoning else "closed"
    finish = random.choice(("stop", "length"))
    pieces = cut(text, random)
    try:
        whole = read_message(reading, opening, text, finish)
        reader, thought, content, calls = AnswerReader(reading, opening), "", "", []
        for event in (*(e for piece in pieces for e in reader.push(piece)), *reader.finish(cut=finish == "length")):
            match event:
                case Thought(piece):
                    thought += piece
                case Text(piece):
                    content += piece
                case Call(_, _, name):
                    calls.append([name, ""])
                case Arguments(index, piece):
                    calls[index][1] += piece
        expected = [[call.name, arguments] for call, arguments in zip(whole.calls, whole.arguments, strict=True)]
        assert (thought, content, calls) == (whole.reasoning, whole.content, expected)
    except Exception as error:
        raise AssertionError(f"{dialect} {opening} {finish}\n{pieces!r}") from error


async def main(seconds: float, seed: int) -> None:
    """Fuzz for ``seconds``; raises AssertionError with the input that shows a defect."""
    random = Random(seed)
    dialects = known_dialects()
    failures = Failures()
    count: dict[int, int] = {}
    answers = 0
    loggers = [logging.getLogger(name) for name in ("atlas.server", "atlas.request")]
    for logger in loggers:
        logger.addHandler(failures)
        logger.propagate = False
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await requests(random, dialects, until, failures, count)
            for _ in range(PER_APPLICATION):
                readers(random, dialects)
                answers += 1
    finally:
        for logger in loggers:
            logger.removeHandler(failures)
            logger.propagate = True
    sys.stdout.write(
        f"{sum(count.values())} requests, by status {dict(sorted(count.items()))}; {answers} answers; seed {seed}\n"
    )


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 2**32))
