"""The API process's end of the connection: the only asynchronous object of the engine."""

import asyncio
import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal, Protocol

from atlas_core.engine.child import EngineProcess
from atlas_core.engine.connection import Connection
from atlas_core.engine.failures import from_failure, to_failure
from atlas_core.engine.serving import Build, serve
from atlas_core.engine.wire import VERSION, Configure, Message, check_hello, encode
from atlas_core.plugins import installed
from atlas_core.plugins.identity import Identity
from atlas_core.vocab.errors import AtlasError, EngineError, RequestError
from atlas_core.vocab.messages import Abort, Delta, Drain, Faulted, Gauges, Generate, Hello, Progress, Ready, StepResult

State = Literal["loading", "ready", "draining", "faulted", "gone"]
OnProgress = Callable[[Progress], None]
Sink = Callable[[Delta], bool]
"""Takes a delta at once, on the event loop's thread, and gives True; or gives False and has done nothing with it."""

STREAM_CAPACITY = 1024
"""Deltas that may wait for the reader of one stream."""
_LOG = logging.getLogger("atlas.engine")
_LAST_WORDS = 0.5
"""Seconds to wait for the exit status of a process whose socket has ended, before its streams are told."""
_GRACE = 2.0
"""Seconds that an engine gets to end by itself before it is killed."""


class EngineClient(Protocol):
    """An engine as the server sees it. Used on one event loop."""

    @property
    def state(self) -> State:
        """What may be expected of the engine now."""
        ...

    @property
    def fault(self) -> AtlasError | None:
        """Why it is faulted; None while it is not."""
        ...

    @property
    def info(self) -> Ready:
        """What the engine said when it was ready. Raises EngineError before."""
        ...

    @property
    def gauges(self) -> Gauges:
        """The load after the last step."""
        ...

    async def start(self, on_progress: OnProgress) -> None:
        """Bring the engine up. Raises the AtlasError for which it could not; when cancelled, it is ended."""
        ...

    def generate(self, request: Generate, /, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        """Deltas of one request; the last has ``finish``.

        ``sink`` is offered every delta but the last, if the consumer waits and nothing else does: what it takes is not yielded. So a
        step's deltas reach their streams without a task for each being woken. Closing the generator or cancelling its consumer aborts
        the request.

        Raises RequestError when it is refused or read too slowly, EngineError when the engine is not ready or has
        ended, and what ``sink`` raised.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Give a request up; its stream ends with ``finish`` abort."""
        ...

    async def drain(self, deadline: float) -> None:
        """Refuse new requests; return when the running ones are done, or were aborted after ``deadline`` seconds."""
        ...

    async def close(self) -> None:
        """End the engine at once; what still runs fails. Safe to call twice."""
        ...


class _Stream:
    """Deltas on their way to one consumer. Never waits: a stream that is full is ended."""

    def __init__(self, capacity: int, sink: Sink | None) -> None:
        self._capacity = capacity
        self._sink = sink
        self._items: deque[Delta | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Delta) -> bool:
        """False when there is no room, and the item is lost."""
        reader = self._reader
        if self._sink is not None and reader is not None and item.finish is None and not reader.done():
            # The consumer has dealt with all that came before, and waits.
            try:
                if self._sink(item):
                    return True
            except Exception as error:  # noqa: BLE001 - one stream's failure, raised in its consumer
                self.fail(error)
                return True
        if len(self._items) >= self._capacity:
            return False
        self._items.append(item)
        self._wake()
        return True

    def fail(self, error: Exception) -> None:
        """End the stream, behind what has come already."""
        self._items.append(error)
        self._wake()

    async def next(self) -> Delta:
        """The next delta; raises the error that ended the stream."""
        while not self._items:
            # A future of its own: an asyncio.Event keeps a queue of waiters, and there is one.
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


class _Client(ABC):
    """What both clients share: everything but how the other end comes to be."""

    def __init__(self, build: str, settings: bytes, *, stream_capacity: int = STREAM_CAPACITY) -> None:
        self.state: State = "loading"
        self.gauges = Gauges()
        self._configuration = Configure(build, settings)
        self._capacity = stream_capacity
        self._streams: dict[str, _Stream] = {}
        self._leaving: set[str] = set()  # given up here, and not yet ended by the engine
        self._info: Ready | None = None
        self._greeted = False
        self._fault: AtlasError | None = None
        self._plugins: Identity = ()  # what is installed here; a thread of this process has no other
        self._connection: Connection | None = None
        self._farewell: asyncio.Task[None] | None = None  # held, since the loop would let go of it
        self._settled = asyncio.Event()  # ready, or ended before that
        self._ended = asyncio.Event()
        self._on_progress: OnProgress = lambda progress: None

    @property
    def fault(self) -> AtlasError | None:
        """See EngineClient."""
        return self._fault

    @property
    def info(self) -> Ready:
        """See EngineClient."""
        if self._info is None:
            raise EngineError("the engine is not ready", "it is still loading, or it failed to", state=self.state)
        return self._info

    async def start(self, on_progress: OnProgress) -> None:
        """See EngineClient."""
        self._on_progress = on_progress
        try:
            self._connection = await self._open()
            self._connection.begin(self._take, self._garbled, self._part)
            self._send(Hello(VERSION, self._plugins))
            self._send(self._configuration)
            await self._settled.wait()
        except BaseException:
            await self.close()
            raise
        if self._info is None:
            await self.close()
            raise self._fault or EngineError("the engine was closed while it was loading", state="gone")

    async def generate(self, request: Generate, /, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        """See EngineClient."""
        if self.state != "ready":
            raise self._unavailable()
        if request.id in self._streams or request.id in self._leaving:
            raise RequestError(
                f"request {request.id} is already running", "ids of live requests are unique", field="id"
            )
        self._send(request)
        stream = self._streams[request.id] = _Stream(self._capacity, sink)
        try:
            while True:
                delta = await stream.next()
                if delta.error is not None:
                    raise from_failure(delta.error)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            # Still registered: the engine has not sent the end, so the consumer is leaving early.
            if self._streams.get(request.id) is stream:
                self._give_up(request.id)

    async def abort(self, request_id: str) -> None:
        """See EngineClient."""
        self._send(Abort(request_id))

    async def drain(self, deadline: float) -> None:
        """See EngineClient."""
        if self.state != "ready":
            return
        self.state = "draining"
        self._send(Drain(deadline))
        with contextlib.suppress(TimeoutError):
            # The engine aborts the rest itself; an engine that cannot even do that is left to close().
            await asyncio.wait_for(self._ended.wait(), deadline + _GRACE)

    async def close(self) -> None:
        """See EngineClient."""
        if self.state != "faulted":
            self.state = "gone"
        if self._connection is not None:
            self._connection.transport.close()
        await self._end()
        if self._connection is not None:
            self._connection.transport.abort()  # an engine that reads nothing any more leaves what was written for it
            await self._ended.wait()

    @abstractmethod
    async def _open(self) -> Connection:
        """Bring the other end to life and connect to it."""

    @abstractmethod
    async def _end(self) -> None:
        """See to it that the other end, whose socket is closed, is no more."""

    @abstractmethod
    async def _last_words(self) -> str:
        """Why the other end is no more, as far as can be told."""

    def _send(self, message: Message) -> None:
        frame = encode(message)
        if self._connection is not None and not self._connection.transport.is_closing():
            self._connection.transport.write(frame)

    def _unavailable(self) -> EngineError:
        why = "" if self._fault is None else self._fault.what
        return EngineError(f"the engine is {self.state}", why, "try again when it is ready", state=self.state)

    def _garbled(self, error: Exception) -> None:
        """Garbage came from the engine, or a progress callback failed."""
        if not isinstance(error, AtlasError):
            _LOG.error("what the engine sent could not be dealt with", exc_info=error)
        self._fail(from_failure(to_failure(error)))

    def _part(self) -> None:
        self._farewell = asyncio.create_task(self._lost())

    def _take(self, message: Message) -> None:
        if not self._greeted:
            check_hello(message, self._plugins)
            self._greeted = True
            return
        match message:
            case StepResult():
                self.gauges = message.gauges
                for delta in message.deltas:
                    self._deliver(delta)
            case Progress():
                self._on_progress(message)
            case Ready():
                self._info = message
                self.state = "ready"
                self._settled.set()
            case Faulted():
                self._fail(from_failure(message.failure))
            case _:
                raise EngineError(f"the engine sent {type(message).__name__}", "it speaks another protocol")

    def _deliver(self, delta: Delta) -> None:
        stream = self._streams.get(delta.id)
        if delta.finish is not None:
            self._leaving.discard(delta.id)
            self._streams.pop(delta.id, None)
        if stream is None or stream.put(delta):
            return  # without a stream: its consumer left before the engine knew
        stream.fail(
            RequestError(
                "the answer was not read in time",
                f"{self._capacity} pieces of it were waiting",
                "read the stream as it comes",
                kind="overloaded",
                code="slow_client",
            )
        )
        if delta.finish is None:
            self._give_up(delta.id)

    def _give_up(self, request_id: str) -> None:
        """Nobody reads this stream any more."""
        del self._streams[request_id]
        self._leaving.add(request_id)
        self._send(Abort(request_id))

    def _fail(self, error: AtlasError) -> None:
        """The engine is of no more use, for this reason; the first one counts."""
        if self._fault is None and self.state != "gone":
            if self._info is not None:  # before, whoever starts it tells
                _LOG.error("the engine has failed: %s", "; ".join(filter(None, (error.what, error.why, error.cure))))
            self._fault = error
            self.state = "faulted"
            self._end_streams()

    async def _lost(self) -> None:
        """The connection has ended: as asked for, or because the engine died."""
        if self.state == "draining" and not self._streams:
            self.state = "gone"
        elif self._fault is None and self.state != "gone":
            words = await self._last_words()
            self._fail(
                EngineError("the engine process ended unexpectedly", words, "see its log; the server must be restarted")
            )
        self._end_streams()
        self.gauges = Gauges()
        self._settled.set()
        self._ended.set()

    def _end_streams(self) -> None:
        what = "the engine has failed" if self._fault is not None else "the engine was shut down"
        why = "" if self._fault is None else ": ".join(filter(None, (self._fault.what, self._fault.why)))
        for stream in self._streams.values():
            stream.fail(EngineError(what, why, "send the request again when the server is back", state=self.state))
        self._streams.clear()


class ProcessClient(_Client):
    """An engine in a child process (engine.process), on a Unix socket in a private directory."""

    def __init__(
        self, build: str, settings: bytes, *, process: EngineProcess | None = None, stream_capacity: int = STREAM_CAPACITY
    ) -> None:  # fmt: skip
        """``build`` is ``module:attr`` of a serving.Build, called in the child with ``settings``.

        ``process`` is one that runs already and waits; None: it is started by ``start``.
        """
        super().__init__(build, settings, stream_capacity=stream_capacity)
        self.process = process

    async def _open(self) -> Connection:
        if self.process is None:
            self.process = EngineProcess()
        connected: asyncio.Future[Connection] = asyncio.Future()
        try:
            loop = asyncio.get_running_loop()
            server = await loop.create_unix_server(lambda: Connection(connected), sock=self.process.listener)
            self._plugins = await asyncio.to_thread(installed)
            ended = asyncio.create_task(self.process.wait())
            either: set[asyncio.Future[Any]] = {ended, connected}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                server.close()
        finally:
            self.process.forget_socket()
        if not connected.done():
            raise EngineError("the engine process did not start", await self._last_words(), "see its log", state="gone")
        return connected.result()

    async def _end(self) -> None:
        if self.process is None:
            return
        try:
            await asyncio.wait_for(self.process.wait(), _GRACE)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    async def _last_words(self) -> str:
        if self.process is None:
            return "it was never started"
        try:
            status = await asyncio.wait_for(self.process.wait(), _LAST_WORDS)
        except TimeoutError:
            return f"process {self.process.pid} closed its connection and still runs"
        return f"it was killed by signal {-status}" if status < 0 else f"it exited with status {status}"


class InProcessClient(_Client):
    """An engine on a thread of this process, behind the same connection and encoding: for tests and tools."""

    def __init__(self, build: Build, settings: bytes = b"", *, stream_capacity: int = STREAM_CAPACITY) -> None:
        super().__init__("", settings, stream_capacity=stream_capacity)
        self._build = build
        self._thread: threading.Thread | None = None

    async def _open(self) -> Connection:
        ours, theirs = socket.socketpair()
        self._thread = threading.Thread(
            target=serve, args=(theirs,), name="atlas-engine", daemon=True,
            kwargs={"closed": lambda: None, "ready": lambda: None, "build": self._build},
        )  # fmt: skip
        self._thread.start()
        _, connection = await asyncio.get_running_loop().create_connection(Connection, sock=ours)
        return connection

    async def _end(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _GRACE)

    async def _last_words(self) -> str:
        return "its thread has ended"
