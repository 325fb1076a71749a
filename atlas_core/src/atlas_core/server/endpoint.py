"""The endpoint of a face that generates: from the bytes of a request to those of its answer."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from atlas_core.server.answer import Reading
from atlas_core.server.body import parse_object, read_body
from atlas_core.server.boundary import Record, json_response, noting, record_of
from atlas_core.server.faces import Face
from atlas_core.server.generation import EventStream, collect, run, while_connected
from atlas_core.server.lifecycle import Lifecycle
from atlas_core.server.limits import Gate, Places
from atlas_core.server.metrics import Metrics
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import ServedModel, Service
from atlas_core.server.schema import Request, read_request, unknown_fields
from atlas_core.server.space import space_of
from atlas_core.server.translate import check_scores, drawn, only_ranked, sampling_params, sequences
from atlas_core.server.turn import Output, Prompt, Turn
from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.messages import Ready
from atlas_core.vocab.sampling import SamplingParams

R = TypeVar("R", bound=Request)
S = TypeVar("S", bound=Struct)

_LOG = logging.getLogger("atlas.server")
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family hold streams back unless told not to.
    (b"x-accel-buffering", b"no"),
)
_MOST_NAMES = 256
_MOST_PREPARATION_S = 30


class UnknownFields:
    """Tells once of everything in requests that has no effect."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, names: Iterable[str]) -> None:
        """Log those of ``names`` that are new; at most 256 in the server's life, since clients choose them."""
        for name in names:
            if name not in self._told and len(self._told) < _MOST_NAMES:
                self._told.add(name)
                _LOG.warning("requests have %r, which has no effect here", name[:64])


class Shared(Struct, frozen=True):
    """What all endpoints of one server have in common. ``clock`` is monotonic, seconds."""

    lifecycle: Lifecycle
    gate: Gate
    metrics: Metrics
    options: ServerOptions
    unknown: UnknownFields = field(default_factory=UnknownFields)
    clock: Callable[[], float] = time.monotonic


class Generation(Generic[R]):
    """An ASGI application for one face."""

    def __init__(self, face: Face[R], shared: Shared) -> None:
        self._face = face
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises AtlasError when it cannot, and ClientDisconnect when nobody waits for it any more."""
        shared = self._shared
        arrival = shared.clock()
        service = shared.lifecycle.service()
        http = HttpRequest(scope, receive)
        body = parse_object(await read_body(http.headers, http.stream(), shared.options.max_body))
        request, unknown = self._face.read(body)
        shared.unknown.tell(unknown)
        model = served_name(service.model, request.model, strict=shared.options.strict_model)
        n = drawn(request)
        capacity = service.engine.info.max_batch_size + shared.options.max_queue
        with shared.gate.enter(n * self._face.count(request), capacity) as places:
            answer = self._answer(service, places, model, request, arrival, scope, receive, send)
            await while_connected(receive, answer)

    async def _answer(
        self,
        service: Service,
        places: Places,
        model: str,
        request: R,
        arrival: float,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        record = record_of(scope)
        record.model, record.requested, record.stream = model, request.model or "", bool(request.stream)
        turn = await make_turn(self._face, service, model, request, arrival, scope)
        outputs = [Output() for _ in turn.sequences]
        shared = self._shared
        send = noting(send, lambda: write_down(record, outputs, turn.n))
        try:
            if turn.stream:
                stream = EventStream(
                    scope, send, STREAM_HEADERS, shared.options.ping_interval, self._face.writer(turn), outputs
                )
                deltas = run(service.engine, turn, places, shared.metrics, shared.clock, record, stream.sink)
                record.error = await stream.respond(deltas, record.id)
            else:
                await collect(run(service.engine, turn, places, shared.metrics, shared.clock, record), outputs)
                write_down(record, outputs, turn.n)
                await json_response(self._face.whole(turn, outputs))(scope, receive, send)
        finally:
            write_down(record, outputs, turn.n)


async def make_turn(face: Face[R], service: Service, model: str, request: R, arrival: float, scope: Scope) -> Turn:
    """``request`` as the internal turn; ``model`` is the name to answer with, ``arrival`` monotonic time. Raises RequestError.

    The ``scope`` tells whose request it is.
    """
    info, served = service.engine.info, service.model
    space = space_of(scope, request.cache_salt)
    reading = face.reading(request, served)
    asked = sampling_params(request, served.sampling, info)
    sampling = _heard(asked, reading, served)
    prompts = await _prepared(face, request, served, info)
    check_scores(prompts, n := drawn(request), sampling)
    answer_id = face.id_prefix + uuid.uuid4().hex
    options = request.stream_options
    return Turn(
        answer_id, int(time.time()), model, info.fingerprint, tuple(prompts), n,
        sequences(prompts, n, sampling, answer_id, arrival, space),
        hidden=served.tokenizer.special_ids - set(sampling.shown_tokens) if sampling.skip_special_tokens else frozenset(),
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        token_ids=bool(request.return_token_ids),
        prompt_logprobs=request.prompt_logprobs,
        reading=reading,
        stops=asked.stop,
        kept=request.n or 1,
        only_ranked=only_ranked(request),
    )  # fmt: skip


async def _prepared(face: Face[R], request: R, model: ServedModel, info: Ready) -> list[Prompt]:
    if face.quick(request):
        return face.prompts(request, model, info)
    work = asyncio.to_thread(face.prompts, request, model, info)
    try:
        return await asyncio.wait_for(work, _MOST_PREPARATION_S)
    except TimeoutError:
        raise RequestError(
            "the request takes too long to prepare", f"{_MOST_PREPARATION_S} s have not been enough",
            "send a shorter prompt, or a simpler grammar", code="too_complex",
        ) from None  # fmt: skip


def _heard(sampling: SamplingParams, reading: Reading, model: ServedModel) -> SamplingParams:
    """``sampling`` with what the dialect needs: control tokens that are markup are shown, and its own ends of turns stop."""
    spellings: list[str] = [*reading.syntax.markers] if reading.syntax and reading.tools else []
    spellings += [reading.reasoning.start.strip(), reading.reasoning.end.strip()] if reading.reasoning else []
    if not spellings and not model.speech.stop:
        return sampling
    tokenizer = model.tokenizer
    control = [text for text in spellings if text in tokenizer.special_tokens]
    shown = tuple(token for text in control for token in tokenizer.encode(text, add_special=False))
    return replace(sampling, shown_tokens=shown, stop=(*sampling.stop, *model.speech.stop))


async def read_asked(http: HttpRequest, kind: type[S], shared: Shared) -> S:
    """The body of ``http`` as ``kind``, for endpoints that are no faces. Raises RequestError."""
    body = parse_object(await read_body(http.headers, http.stream(), shared.options.max_body))
    asked = read_request(kind, body)
    shared.unknown.tell(unknown_fields(kind, body))
    return asked


def served_name(model: ServedModel, asked: str | None, *, strict: bool) -> str:
    """The name to answer with: the one asked for, where the model has it. Raises RequestError when ``strict`` and it has not."""
    if asked in model.names:
        return asked
    if strict and asked is not None:
        raise unknown_model(asked, model)
    return model.names[0]


def unknown_model(asked: str, model: ServedModel) -> RequestError:
    """404 for a model that is not served here."""
    return RequestError(
        f"the model {asked[:128]!r} is not served here", f"this server has {', '.join(model.names)}", "", kind="not_found",
        field="model", code="model_not_found",
    )  # fmt: skip


def write_down(record: Record, outputs: list[Output], n: int) -> None:
    """Put the tokens of ``outputs`` into the request's record."""
    record.prompt_tokens = sum(output.prompt_tokens for output in outputs[::n])
    record.cached_tokens = sum(output.cached_tokens for output in outputs[::n])
    record.completion_tokens = sum(output.completion_tokens for output in outputs)
    record.finish = tuple(output.finish or "abort" for output in outputs)
