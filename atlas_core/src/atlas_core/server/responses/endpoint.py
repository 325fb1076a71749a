"""``POST /v1/responses``: whole, streamed, or in the background."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from atlas_core.server.body import parse_object, read_body
from atlas_core.server.boundary import json_response, noting, record_of
from atlas_core.server.chat import Chat
from atlas_core.server.endpoint import STREAM_HEADERS, Shared, make_turn, served_name, write_down
from atlas_core.server.errors import internal_error
from atlas_core.server.generation import Deltas, EventStream, run, while_connected
from atlas_core.server.ports import Service
from atlas_core.server.responses.answer import Asked, ResponseWriter, summary_of
from atlas_core.server.responses.assembly import Shape
from atlas_core.server.responses.context import Context, conversation_id, gather
from atlas_core.server.responses.following import send_log
from atlas_core.server.responses.jobs import EventLog, Job, Jobs
from atlas_core.server.responses.schema import UNSUPPORTED, WITHOUT_EFFECT, InputRequest, ResponsesRequest
from atlas_core.server.responses.tools import Tools, read_tools
from atlas_core.server.responses.translate import SEALED, chat_request, in_own_words, later_beginnings
from atlas_core.server.responses.turns import TurnTaking
from atlas_core.server.schema import read_request, unknown_fields
from atlas_core.server.store.owner import owner_of
from atlas_core.server.store.port import Item, Store
from atlas_core.server.store.port import Record as Kept
from atlas_core.server.turn import Output, Turn
from atlas_core.vocab.errors import AtlasError, RequestError

_LOG = logging.getLogger("atlas.server")


class _ResponsesChat(Chat):
    """Chat, but for the ids of answers."""

    id_prefix = "resp_"


def new_id(prefix: str) -> str:
    """A fresh id."""
    return prefix + uuid.uuid4().hex


class _Work(Struct, frozen=True):
    """A request, understood. ``kept``: the answer is stored."""

    owner: str
    request: ResponsesRequest
    context: Context
    turn: Turn
    writer: ResponseWriter
    kept: bool


class Responses:
    """An ASGI application that makes responses."""

    def __init__(self, shared: Shared, store: Store, jobs: Jobs, clock: Callable[[], float]) -> None:
        """``clock`` is Unix time, seconds."""
        self._shared = shared
        self._store = store
        self._jobs = jobs
        self._turns = TurnTaking()
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises AtlasError when it cannot, and ClientDisconnect when nobody waits for it any more."""
        shared = self._shared
        arrival = shared.clock()
        service = shared.lifecycle.service()
        http = HttpRequest(scope, receive)
        body = parse_object(await read_body(http.headers, http.stream(), shared.options.max_body))
        request = read_request(ResponsesRequest, body, UNSUPPORTED)
        shared.unknown.tell(unknown_fields(ResponsesRequest, body, {*UNSUPPORTED, *WITHOUT_EFFECT}))
        kept = request.store is not False and self._store.keeps
        if request.background and not kept:
            raise RequestError(
                "background needs store", "nobody could ask for an answer that is not kept",
                "leave background out" if not self._store.keeps else "leave store out", field="background", code="invalid_value",
            )  # fmt: skip
        capacity = service.engine.info.max_batch_size + shared.options.max_queue
        with ExitStack() as stack:
            places = stack.enter_context(shared.gate.enter(1, capacity))
            conversation = conversation_id(request.conversation)
            if conversation is not None:
                # What another one says there first is part of what this one answers.
                turn = self._turns.wait((owner_of(scope), conversation))
                stack.callback(await while_connected(receive, turn))
            work = await while_connected(receive, self._understand(service, request, scope, arrival, kept=kept))
            record = record_of(scope)
            record.model, record.requested = work.turn.model, request.model or ""
            record.stream = work.turn.stream
            # A response in the background outlives its request, and so the record of that.
            written = None if request.background else record
            engine, outputs = service.engine, [Output()]
            if written is not None:
                send = noting(send, lambda: write_down(record, outputs, 1))
            stream = None
            if work.turn.stream and not request.background:
                stream = EventStream(scope, send, STREAM_HEADERS, shared.options.ping_interval, work.writer, outputs)
            sink = None if stream is None else stream.sink
            deltas = self._kept(run(engine, work.turn, places, shared.metrics, shared.clock, written, sink), work)
            if not request.background:
                await while_connected(receive, self._answer(work, deltas, stream, outputs, scope, receive, send))
                return
            job = await self._begin(work, deltas, stack.pop_all(), scope["state"].get("charge", _free))
        if job.log is None:
            await json_response(job.body)(scope, receive, send)
        else:
            await while_connected(receive, send_log(send, job.log, 0, shared.options.ping_interval))

    async def _understand(
        self, service: Service, request: ResponsesRequest, scope: Scope, arrival: float, *, kept: bool
    ) -> _Work:
        owner = owner_of(scope)
        tools = read_tools(request.tools or ())
        self._shared.unknown.tell(tools.skipped)
        context = await gather(self._store, owner, request, new_id)
        self._shared.unknown.tell(context.skipped)
        turn = await prepare(self._shared, service, request, context, tools, arrival, scope)
        shape = Shape(tools.custom, tools.spaces, summary_of(request) is not None, SEALED in (request.include or ()))
        writer = ResponseWriter(turn, Asked(request, kept, context.conversation), shape, new_id, self._clock)
        return _Work(owner, request, context, turn, writer, kept)

    async def _answer(
        self, work: _Work, deltas: Deltas, stream: EventStream | None, outputs: list[Output], scope: Scope, receive: Receive,
        send: Send,
    ) -> None:  # fmt: skip
        record = record_of(scope)
        try:
            if stream is not None:
                record.error = await stream.respond(deltas, record.id)
            else:
                async for index, delta in deltas:
                    outputs[index].count(delta)
                    work.writer.chunk(index, delta)
                write_down(record, outputs, 1)
                await json_response(work.writer.body)(scope, receive, send)
        finally:
            await deltas.aclose()
            write_down(record, outputs, 1)

    async def _begin(self, work: _Work, deltas: Deltas, stack: ExitStack, charge: Callable[[int], None]) -> Job:
        """A job that goes on whatever becomes of the client; when it ends, ``stack`` is left and its tokens are told to ``charge``."""
        job = Job(work.writer.waiting(), EventLog() if work.turn.stream else None)
        try:
            await self._save(work, job.body)
        except BaseException:
            stack.close()
            raise
        task = self._jobs.start(work.owner, job, self._run(job, work, deltas, charge))
        task.add_done_callback(lambda _: stack.close())
        return job

    async def _run(self, job: Job, work: _Work, deltas: Deltas, charge: Callable[[int], None]) -> None:
        writer = work.writer
        log = job.log or EventLog()
        output = Output()
        try:
            job.body = writer.body
            log.add(writer.opening())
            async for index, delta in deltas:
                output.count(delta)
                log.add(writer.chunk(index, delta))
            log.add(writer.closing([]))
        except AtlasError as error:
            log.add(writer.failed(error))
        finally:
            job.body = writer.body
            log.end()
            charge(output.prompt_tokens + output.completion_tokens)
            _LOG.info(
                "response %s in the background: %s prompt=%d completion=%d", work.turn.id, writer.body["status"], output.prompt_tokens,
                output.completion_tokens,
            )  # fmt: skip
            await deltas.aclose()

    async def _kept(self, deltas: Deltas, work: _Work) -> Deltas:
        """``deltas``; whoever has seen the last of them finds the response in the store.

        One that fails is kept as failed, if its client can know of it. One that is given up is kept as cancelled if it runs in the
        background, else not at all.
        """
        writer = work.writer
        try:
            async for pair in deltas:
                yield pair
            await self._save(work, writer.body, ended=True)
        except Exception as error:
            if not (work.turn.stream or work.request.background):
                raise
            told = _told_to_client(error, work.turn.id)
            writer.fail(told)
            await self._save(work, writer.body)
            raise told from error
        except (asyncio.CancelledError, GeneratorExit):
            if work.request.background:
                writer.cancel()
                await asyncio.shield(self._save(work, writer.body))
            raise
        finally:
            await deltas.aclose()

    async def _save(self, work: _Work, body: Mapping[str, Any], *, ended: bool = False) -> None:
        context, output = work.context, tuple(work.writer.items)
        if work.kept:
            items = (*context.items, *output)
            bare = {name: value for name, value in body.items() if name != "output"}
            record = Kept(work.turn.id, "response", work.turn.created, bare, items, len(context.items))
            await self._store.save(work.owner, record)
        if ended and context.conversation is not None:
            await self._store.append(work.owner, context.conversation, (*context.items[context.own :], *output))


async def prepare(
    shared: Shared,
    service: Service,
    request: InputRequest,
    context: Context,
    tools: Tools,
    arrival: float,
    scope: Scope,
) -> Turn:
    """The turn of ``request``, of as much of its context as fits if it says ``truncation: auto``.

    Raises RequestError with the names of its own fields.
    """
    model = served_name(service.model, request.model, strict=shared.options.strict_model)

    async def turn_of(items: Sequence[Item]) -> Turn:
        try:
            chat = chat_request(request, items, tools)
            return await make_turn(_ResponsesChat(), service, model, chat, arrival, scope)
        except RequestError as error:
            raise in_own_words(error) from None

    try:
        return await turn_of(context.items)
    except RequestError as error:
        later = later_beginnings(context.items)
        if request.truncation != "auto" or error.code != "context_length_exceeded" or not later:
            raise
    shortest = await turn_of(later.pop())
    # The later the beginning, the shorter the prompt: the earliest that fits is found by halving.
    low, high = 0, len(later)
    while low < high:
        middle = (low + high) // 2
        try:
            shortest = await turn_of(later[middle])
            high = middle
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            low = middle + 1
    return shortest


def _free(tokens: int) -> None:
    """Where there are no limits, tokens cost nothing."""


def _told_to_client(error: Exception, response_id: str) -> AtlasError:
    if isinstance(error, AtlasError):
        return error
    _LOG.error("response %s failed", response_id, exc_info=error)
    return internal_error(response_id)
