"""A scripted engine, a byte tokenizer, and a server that runs them behind a real socket."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn.server
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent))

from documented import Documented

from atlas_core.plugins import discover
from atlas_core.plugins.load import load
from atlas_core.server.app import Application
from atlas_core.server.listen import bind_socket, url_of
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import OnProgress, ServedModel, Service, Sink
from atlas_core.server.run import DrainingServer
from atlas_core.text.detokenize import Detokenizer
from atlas_core.text.dialect.choice import choose
from atlas_core.text.stop import StopMatcher
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.errors import AtlasError, EngineError
from atlas_core.vocab.messages import Delta, Gauges, Generate, Position, Progress, Ready, TokenLogprob

BOS, EOS, VOCAB = 256, 257, 260
ANSWER = "“é😀” said: one two three."
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


class ByteTokenizer:
    """Ids 0 to 255 are bytes; ``<bos>`` and ``<eos>`` are control tokens."""

    special_ids = frozenset({BOS, EOS})
    special_tokens = frozenset({"<bos>", "<eos>"})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids = [BOS] if add_special else []
        for part in text.split("<eos>") if parse_special else [text]:
            ids += [*part.encode(), EOS]
        return ids[:-1]

    def token_bytes(self, token: int) -> bytes:
        return spelling(token, skip_special=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(spelling(token, skip_special=skip_special) for token in ids).decode(errors="replace")


def spelling(token: int, *, skip_special: bool = True) -> bytes:
    if token < BOS:
        return bytes([token])
    return b"" if skip_special else {BOS: b"<bos>", EOS: b"<eos>"}.get(token, b"")


def deltas(
    request: Generate, text: str = ANSWER, *, chunk: int = 1, context: int = 512, ends: bool = True
) -> list[Delta]:
    """What an engine would send for an answer of ``text``, ``chunk`` tokens a step: it really stops, counts and holds back."""
    sampling = request.sampling
    tokens = [*text.encode(), EOS] if ends else list(text.encode())
    room = min(sampling.max_tokens or context, context - len(request.prompt))
    stops = StopMatcher(sampling.stop, include=sampling.include_stop_in_output)
    reader = Detokenizer(lambda token: spelling(token, skip_special=sampling.skip_special_tokens))
    steps: list[tuple[int, str]] = []
    finish, stop = None, None
    while finish is None:
        token = tokens[len(steps) % len(tokens)]
        match = stops.push(reader.push(token))
        steps.append((token, match.text))
        if match.hit is not None:
            finish, stop = "stop", match.hit
        elif (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            finish, stop = "stop", str(token)
        elif len(steps) == room:
            finish = "length"
    made = [
        Delta(
            request.id,
            tuple(token for token, _ in steps[at : at + chunk]),
            "".join(text for _, text in steps[at : at + chunk]),
            tuple(position(token, sampling.logprobs) for token, _ in steps[at : at + chunk])
            if sampling.logprobs is not None
            else (),
            prompt_tokens=len(request.prompt),
            completion_tokens=min(at + chunk, len(steps)),
            cached_tokens=1,
        )
        for at in range(0, len(steps), chunk)
    ]
    rest = "" if stop in sampling.stop and stop is not None else stops.push(reader.finish()).text + stops.finish()
    return [*made[:-1], made[-1]._replace(text=made[-1].text + rest, finish=finish, stop=stop)]


def position(token: int, count: int | None) -> Position:
    def entry(rank: int) -> TokenLogprob:
        data = spelling((token + rank) % 256 if rank else token, skip_special=False)
        value = float("-inf") if rank == 4 else -0.5 - rank
        return TokenLogprob(token + rank, data.decode(errors="replace"), value, data)

    return Position(entry(0), tuple(entry(rank) for rank in range(count or 0)))


@dataclass
class FakeEngine:
    """``answer`` gives the deltas of a request; one is sent every ``delay`` seconds, to ``slots`` requests at once."""

    answer: Callable[[Generate], list[Delta]] = deltas
    delay: float = 0.0
    slots: int = 8
    prefill: float = 0.0
    context: int = 512
    state: str = "ready"
    fault: AtlasError | None = None
    requests: list[Generate] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    closed: bool = False
    taken: int = 0

    @property
    def info(self) -> Ready:
        return Ready(self.context, self.slots, VOCAB, "fp-test")

    @property
    def gauges(self) -> Gauges:
        return Gauges(self.running, self.waiting, self.running * 16, 1024, steps=7, preemptions=2)

    async def generate(self, request: Generate, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.waiting += 1
        started = done = False
        try:
            while self.running >= self.slots:  # noqa: ASYNC110 whoever is first when a slot is free
                await asyncio.sleep(0.005)
            self.waiting -= 1
            self.running += 1
            started = True
            await asyncio.sleep(self.prefill)
            for delta in self.answer(request):
                await asyncio.sleep(self.delay)
                if self.closed:
                    raise EngineError("the engine is gone", "it was closed", "", state="gone")
                done = delta.finish is not None
                # Whoever reads this generator waits, and so everything before is dealt with.
                if sink is not None and not done and sink(delta):
                    self.taken += 1
                    continue
                yield delta
        finally:
            self.running -= started
            self.waiting -= not started
            if not done:
                self.aborted.append(request.id)

    async def drain(self, deadline: float) -> None:
        self.state = "draining"
        end = time.monotonic() + deadline
        while (self.running or self.waiting) and time.monotonic() < end:  # noqa: ASYNC110 tests look at these counts too
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.closed = True


class Recorder:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def progress(self, progress: Progress) -> None:
        self.events.append(("progress", progress))

    def ready(self, url: str, info: Ready) -> None:
        self.events.append(("ready", url, info))

    def notice(self, text: str) -> None:
        self.events.append(("notice", text))


def model(**changes: Any) -> ServedModel:
    template = ChatTemplate(TEMPLATE, {}, strftime=time.strftime)
    return replace(ServedModel(("tiny", "org/tiny"), ByteTokenizer(), template, 1700000000), **changes)


class _Impatient:
    """asyncio, for uvicorn's server: it looks every 100 ms whether it shall end, and takes 200 to do so, hundreds of times here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


@pytest.fixture(scope="session", autouse=True)
def quick_ends() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _Impatient())
        yield


class Running:
    """A server on a free port, in a thread."""

    def __init__(
        self, engine: FakeEngine, options: ServerOptions, served: ServedModel, bring_up: Any = None, store: Any = None,
        tracing: Any = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.reporter = Recorder()

        async def ready(on_progress: OnProgress) -> Service:
            on_progress(Progress("weights", 1, 2, "half"))
            return Service(engine, served)

        self.app = Application(bring_up or ready, options, self.reporter, store, tracing)
        listener = bind_socket("127.0.0.1", 0)
        self.url = self.app.url = url_of(listener)
        self.server = DrainingServer(self.app)
        self.app.failed = self.server.stop
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        self.documented = Documented(self.app.table)
        self.http = httpx.Client(
            base_url=self.url, timeout=20, trust_env=False, event_hooks={"response": [self.documented]}
        )

    def wait(self, state: str = "ready") -> "Running":
        until(lambda: self.http.get("/health").json()["status"] == state)
        return self

    def stop(self) -> None:
        self.http.close()
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]} | body)

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 400} | body)


def speech(template: str = "", **names: Any) -> Any:
    """How a model with ``template`` speaks, by core's dialects."""
    registry = discover()
    known = {name: load(found.dialect, "atlas_core")() for name, found in registry.dialects.items()}
    return choose(known, template, **names)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)


def serving() -> Iterator[Callable[..., Running]]:
    """Start servers: ``serve(engine, options fields…)``; each is stopped at the end."""
    started: list[Running] = []

    def start(
        engine: FakeEngine | None = None, *, served: ServedModel | None = None, bring_up: Any = None, state: str = "ready",
        store: Any = None, tracing: Any = None, **options: Any,
    ) -> Running:  # fmt: skip
        running = Running(engine or FakeEngine(), ServerOptions(**options), served or model(), bring_up, store, tracing)
        started.append(running)
        return running.wait(state)

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [running.stop() for running in started])
        yield start


serve = pytest.fixture(serving)
serve_module = pytest.fixture(scope="module")(serving)


@pytest.fixture(scope="session")
def kit() -> Any:
    """The pieces above, for tests that put them together themselves."""
    return Kit


class Kit:
    answer = ANSWER
    deltas = staticmethod(deltas)
    engine = FakeEngine
    model = staticmethod(model)
    speech = staticmethod(speech)
    until = staticmethod(until)
    recorder = Recorder
    tokenizer = ByteTokenizer
    eos = EOS
    bos = BOS
    vocab = VOCAB
    running = Running


def events(response_text: str) -> list[str]:
    """The payloads of a stream, comments left out."""
    lines = [line for line in response_text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


Kit.events = staticmethod(events)  # type: ignore[attr-defined]
