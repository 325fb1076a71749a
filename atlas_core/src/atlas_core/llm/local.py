"""An engine on a thread of this process: requests in, deltas out, without sockets or an event loop."""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

from atlas_core.engine.failures import from_failure, to_failure
from atlas_core.engine.loop import Closed, Engine, Inbox
from atlas_core.vocab.errors import AtlasError, EngineError
from atlas_core.vocab.messages import Abort, Delta, FromEngine, Generate, Ready, StepResult

Build = Callable[[], tuple[Engine, Callable[[], None]]]
"""Makes the engine, and what gives the device back; called on the thread that will run it. Raises AtlasError."""

_GRACE = 30.0
"""Seconds for a step that is under way when the engine is closed."""


class LocalEngine:
    """Runs an engine until closed. Threads may use it at once, each for requests of its own."""

    def __init__(self, build: Build, window: Callable[[Ready], int]) -> None:
        """Returns when the engine is ready. ``window`` gives how many requests of one caller may be under way at once.

        Raises the AtlasError for which it could not be built.
        """
        self._shared = _Shared()
        self._thread = threading.Thread(target=_run, args=(build, self._shared), name="atlas-engine", daemon=True)
        # Runs at the latest when the interpreter ends, so that no thread computes while it is taken down.
        self._finalizer = weakref.finalize(self, _stop, self._shared, self._thread)
        self._thread.start()
        first = self._shared.ready.get()
        if isinstance(first, AtlasError):
            self.close()
            raise first
        self.info = first
        self._window = max(1, window(first))

    def run(self, requests: Iterable[Generate]) -> Iterator[Delta]:
        """Deltas of all requests, as they come; the next is handed in when one ends. Leaving the iterator aborts the rest.

        Ids are unique among live requests. Raises RequestError when one is refused, EngineError when the engine is closed or fails.
        """
        waiting = deque(requests)
        stream: SimpleQueue[Delta | AtlasError] = SimpleQueue()
        live: set[str] = set()
        try:
            while waiting or live:
                while waiting and len(live) < self._window:
                    request = waiting.popleft()
                    self._shared.submit(request, stream)
                    live.add(request.id)
                item = stream.get()
                if isinstance(item, AtlasError):
                    raise item
                if item.finish is not None:
                    live.discard(item.id)
                if item.error is not None:
                    raise from_failure(item.error)
                yield item
        finally:
            for request_id in live:
                self._shared.abort(request_id)

    def close(self) -> None:
        """End the engine; what still runs fails. Safe to call twice."""
        self._finalizer()


class _Shared:
    """What the engine's thread and its callers both touch; holds no LocalEngine, which therefore can be collected."""

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.ready: SimpleQueue[Ready | AtlasError] = SimpleQueue()
        self._lock = threading.Lock()
        self._streams: dict[str, SimpleQueue[Delta | AtlasError]] = {}
        self._ended: AtlasError | None = None

    def submit(self, request: Generate, stream: "SimpleQueue[Delta | AtlasError]") -> None:
        """Hand a request in; its deltas go to ``stream``. Raises EngineError when the engine has ended."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._streams[request.id] = stream
        self.inbox.put(request)

    def abort(self, request_id: str) -> None:
        """Nobody reads this request's deltas any more."""
        with self._lock:
            self._streams.pop(request_id, None)
        self.inbox.put(Abort(request_id))

    def emit(self, message: FromEngine) -> None:
        """Deliver what a step gave."""
        if isinstance(message, StepResult):
            for delta in message.deltas:
                with self._lock:
                    stream = self._streams.get(delta.id)
                    if delta.finish is not None:
                        self._streams.pop(delta.id, None)
                if stream is not None:
                    stream.put(delta)

    def end(self, error: AtlasError) -> None:
        """Nothing more comes, for this reason."""
        with self._lock:
            self._ended = error
            streams = set(self._streams.values())
            self._streams.clear()
        for stream in streams:
            stream.put(error)


def _run(build: Build, shared: _Shared) -> None:
    """The engine's thread."""
    end: AtlasError = EngineError("the engine is closed", "close() was called", "make another LLM", state="gone")
    try:
        engine, release = build()
    except Exception as error:  # noqa: BLE001 - raised again where the engine was asked for
        shared.ready.put(_explained(error))
        return
    shared.ready.put(engine.info)
    try:
        engine.run(shared.inbox, shared.emit)
    except Exception as error:  # noqa: BLE001 - raised again by every call that waits or comes later
        end = _explained(error)
    finally:
        shared.end(end)
        with contextlib.suppress(AtlasError):
            release()  # after a fault the device may refuse; the calls have the fault itself


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    shared.inbox.put(Closed())
    # The garbage collector may run this on the engine's own thread, which then ends after the present step.
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_GRACE)


def _explained(error: Exception) -> AtlasError:
    if isinstance(error, AtlasError):
        return error
    explained = from_failure(to_failure(error))
    explained.__cause__ = error
    return explained
