"""Runs a turn on the engine: merges its sequences, watches the client, writes the answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from atlas_core.server.boundary import Record
from atlas_core.server.errors import internal_error
from atlas_core.server.faces import ChunkWriter
from atlas_core.server.limits import Places
from atlas_core.server.metrics import Metrics
from atlas_core.server.ports import Engine, Sink
from atlas_core.server.protocol import SHORT_WAY
from atlas_core.server.turn import Output, Turn
from atlas_core.vocab.errors import AtlasError, EngineError
from atlas_core.vocab.messages import Delta, Generate

T = TypeVar("T")
Deltas = AsyncGenerator[tuple[int, Delta], None]
Clock = Callable[[], float]
ShortWay = Callable[[bytes], bool]
"""Sends a piece of a body that has begun, at once; False where it has to go through ``send``, and nothing is sent. An empty one only asks."""

_LOG = logging.getLogger("atlas.server")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client goes away; raises ClientDisconnect then."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run(
    engine: Engine, turn: Turn, places: Places, metrics: Metrics, clock: Clock, record: Record | None = None,
    sink: Sink | None = None,
) -> Deltas:  # fmt: skip
    """(choice, delta) of all sequences of ``turn``, each in its own order. Raises AtlasError when any of them fails.

    ``record`` learns when the first token came. Frees one of ``places`` before the last delta of each. Closing the generator aborts what is still running.
    Of a single sequence, ``sink`` is offered deltas between the first and the last: what it takes is counted, and not yielded.
    """
    if len(turn.sequences) > 1:
        sink = None  # deltas of one choice may wait where another's are merged with them
    streams = [
        _checked(engine, index, request, places, metrics, clock, record, sink)
        for index, request in enumerate(turn.sequences)
    ]
    merged = streams[0] if len(streams) == 1 else _merged(streams)
    try:
        async for pair in merged:
            yield pair
    finally:
        await merged.aclose()


async def collect(deltas: Deltas, outputs: Sequence[Output]) -> None:
    """Put everything that ``deltas`` bring into ``outputs``, one for each choice."""
    try:
        async for index, delta in deltas:
            outputs[index].add(delta)
    finally:
        await deltas.aclose()


class EventStream:
    """Sends one stream. What fails before the first delta is raised, to become an HTTP status; what fails later, an event."""

    def __init__(
        self, scope: Scope, send: Send, headers: Sequence[tuple[bytes, bytes]], ping_interval: float, writer: ChunkWriter,
        outputs: Sequence[Output],
    ) -> None:  # fmt: skip
        """``ping_interval``: seconds without data after which the writer's ping is sent.

        The first delta is awaited for as long, before the headers are sent without it. ``outputs`` get the totals of what is sent.
        """
        self._send = send
        self._short: ShortWay | None = scope.get("extensions", {}).get(SHORT_WAY)
        self._headers = headers
        self._interval = ping_interval
        self._writer = writer
        self._outputs = outputs
        self._began = False
        self._quiet = True

    def sink(self, delta: Delta) -> bool:
        """See ports.Sink: the way of nearly every delta of a stream of one choice, if the server has a short one and its client keeps up."""
        short = self._short
        if short is None or not self._began or not short(b""):
            return False
        self._outputs[0].count(delta)
        data = self._writer.chunk(0, delta)
        if data:
            self._quiet = False
            short(data)
        return True

    async def respond(self, deltas: Deltas, request_id: str) -> str | None:
        """Send all of ``deltas``. Gives the error's text when the stream broke off."""
        first = asyncio.ensure_future(anext(deltas))
        try:
            await asyncio.wait({first}, timeout=self._interval)
            if first.done():
                first.result()
            await self._send({"type": "http.response.start", "status": 200, "headers": list(self._headers)})
            opening = self._writer.opening()
            if opening:
                await self._write(opening)
            pinger = asyncio.create_task(self._ping(self._writer.ping))
            try:
                failure = await self._deliver(first, deltas, request_id)
            finally:
                pinger.cancel()
                await asyncio.gather(pinger, return_exceptions=True)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            return failure
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await deltas.aclose()

    async def _deliver(self, first: Awaitable[tuple[int, Delta]], deltas: Deltas, request_id: str) -> str | None:
        writer = self._writer
        try:
            await self._one(await first)
            self._began = True
            async for pair in deltas:
                await self._one(pair)
        except AtlasError as error:
            await self._write(writer.failed(error))
            return error.what
        except Exception as error:  # noqa: BLE001 the status is out, so that nobody above could tell the client
            _LOG.error("request %s failed while it was streamed", request_id, exc_info=error)
            await self._write(writer.failed(internal_error(request_id)))
            return type(error).__name__
        await self._write(writer.closing(self._outputs))
        return None

    async def _one(self, pair: tuple[int, Delta]) -> None:
        index, delta = pair
        self._outputs[index].count(delta)
        data = self._writer.chunk(index, delta)
        if data:
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        self._quiet = False
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _ping(self, ping: bytes) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(self._interval)
            if self._quiet:
                await self._write(ping)


class _Timing:
    """When the tokens of one sequence came."""

    def __init__(self, arrival: float, metrics: Metrics, clock: Clock, record: Record | None) -> None:
        self._arrival = arrival
        self._metrics = metrics
        self._clock = clock
        self._record = record
        self.first: float | None = None
        self.last: float | None = None

    def count(self, delta: Delta) -> None:
        """A delta came."""
        tokens = len(delta.tokens)
        if not tokens:
            return
        now = self._clock()
        if self.last is not None:
            self._metrics.tokens(tokens, (now - self.last) / tokens)
        else:
            self.first = now
            self._metrics.first_token(tokens, now - self._arrival)
            if delta.started is not None:
                self._metrics.started(delta.started - self._arrival, now - delta.started)
            if self._record is not None and self._record.first_token is None:
                self._record.first_token = now - self._arrival
        self.last = now


async def _checked(
    engine: Engine, index: int, request: Generate, places: Places, metrics: Metrics, clock: Clock, record: Record | None,
    sink: Sink | None,
) -> Deltas:  # fmt: skip
    """One sequence, measured; its failures are raised."""
    timing = _Timing(request.arrival, metrics, clock, record)

    def taken(delta: Delta) -> bool:
        if sink is None or not sink(delta):
            return False
        timing.count(delta)
        return True

    stream = engine.generate(request, None if sink is None else taken)
    delta = Delta(request.id)
    reason = "abort"
    try:
        async for delta in stream:
            if delta.finish in ("abort", "error"):
                reason = delta.finish
                raise EngineError(
                    "the engine ended the request early", "it was aborted", "send it again", state=engine.state
                )
            timing.count(delta)
            if delta.finish is not None:
                reason = delta.finish
                if timing.first is not None and timing.last is not None:
                    metrics.answered(
                        timing.last - request.arrival, timing.last - timing.first, delta.completion_tokens - 1
                    )
                places.free()
                yield index, delta
                return
            yield index, delta
        reason = "error"
        raise EngineError(
            "the engine ended the request early", "its answer has no end", "send it again", state=engine.state
        )
    except AtlasError:
        reason = "error"
        raise
    finally:
        metrics.finished(reason, delta.prompt_tokens, delta.cached_tokens)
        await stream.aclose()


async def _merged(streams: Sequence[Deltas]) -> Deltas:
    """Items of all ``streams`` as they come; the first failure ends them all. A slow reader slows every stream."""
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: Deltas, queue: "asyncio.Queue[tuple[int, Delta] | Exception | None]") -> None:
    try:
        async for item in stream:
            await queue.put(item)
    except Exception as error:  # noqa: BLE001 raised again by the reader
        await queue.put(error)
    else:
        await queue.put(None)
    finally:
        await stream.aclose()
