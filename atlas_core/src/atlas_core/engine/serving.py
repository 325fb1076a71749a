"""The engine's end of the connection: greet, build, run; every way in which that can end is told to the other side."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from atlas_core.engine.failures import to_failure
from atlas_core.engine.loop import Closed, Compiled, Engine, Inbox
from atlas_core.engine.wire import VERSION, Configure, Frames, Message, check_hello, decode, encode
from atlas_core.plugins.identity import Identity
from atlas_core.plugins.load import load
from atlas_core.vocab.errors import AtlasError, EngineError
from atlas_core.vocab.messages import Faulted, Hello, Progress

Report = Callable[[Progress], None]
Build = Callable[[bytes, Report], Engine]
"""Makes the engine from encoded settings, on the thread that will run it, and reports how it goes.

Raises AtlasError.
"""

_LOG = logging.getLogger("atlas.engine")
_CHUNK = 1 << 16
_LINGER = 2.0
"""Seconds that the other side gets to read the last message and hang up."""


def serve(
    connection: socket.socket, *, closed: Callable[[], None], ready: Callable[[], None], build: Build | None = None,
    plugins: Identity = (), early: bytes | None = None,
) -> bool:  # fmt: skip
    """Be the engine on ``connection`` until the other side goes away or a drain is done; False when something failed.

    ``closed`` is called at once, on another thread, when the other side goes away; ``ready`` before requests are taken.
    ``build`` stands for the one that Configure names. ``plugins`` are what is installed here: a peer that has others is
    refused, since the two would not mean the same model. ``early`` are settings that will most likely be ordered: with them ``build``
    begins at once. Nothing is raised: the other side is told, if it is still there.
    """
    inbox: Inbox = SimpleQueue()
    sender = _Sender(connection)
    ending = threading.Event()
    reader = threading.Thread(target=_read, args=(connection, inbox, closed, ending), name="atlas-read", daemon=True)
    reader.start()
    engine: Engine | None = None
    try:
        sender.send(Hello(VERSION, plugins))
        begun = None if build is None or early is None else _attempt(build, early, sender.send)
        if begun is not None and begun.exception() is None:
            engine = begun.result()
        check_hello(_next(inbox), plugins)
        configuration = _configuration(_next(inbox))
        if begun is not None and configuration.settings == early:
            engine = begun.result()  # raises what the attempt raised, now that the other side listens
        else:
            if engine is not None:
                engine.close()
                engine = None
            engine = (build or load(configuration.build, "atlas-core"))(configuration.settings, sender.send)
        ready()
        sender.send(engine.info)
        engine.run(inbox, sender.send)
    except Exception as error:  # noqa: BLE001 - whatever ends the engine, its clients hear of it
        if not isinstance(error, AtlasError):
            _LOG.exception("the engine has failed unexpectedly")
        sender.send(Faulted(to_failure(error)))
        return False
    else:
        return True
    finally:
        if engine is not None:
            with contextlib.suppress(AtlasError):
                engine.close()  # after a fault the device may refuse, and its memory goes with the process
        ending.set()
        sender.close()
        # Closing while the other side still writes would break its connection before it has read the last message.
        reader.join(_LINGER)
        connection.close()


def _attempt(build: Build, settings: bytes, report: Report) -> "Future[Engine]":
    attempt: Future[Engine] = Future()
    try:
        attempt.set_result(build(settings, report))
    except Exception as error:  # noqa: BLE001 - raised where the result is asked for
        attempt.set_exception(error)
    return attempt


class _Sender:
    """Sends at once what the other side has room for; the rest on a thread of its own, so that no step waits for it to read.

    What piles up meanwhile is bounded by the running requests: a token is sent once, and they have a limit.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._late: SimpleQueue[memoryview | None] = SimpleQueue()
        self._order = threading.Lock()
        self._pending = 0  # frames that the thread has not sent whole
        self._thread = threading.Thread(target=self._run, name="atlas-send", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message, or queue what does not fit. Raises EngineError when it cannot be encoded."""
        frame = memoryview(encode(message))
        with self._order:
            if not self._pending:
                # A thread would get to it when this one next waits, and every client's token with it.
                try:
                    frame = frame[self._connection.send(frame, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # when the other side is gone the reader finds out too, and ends the engine
            if frame:
                self._pending += 1
                self._late.put(frame)

    def close(self) -> None:
        """Send what is queued, and say that nothing more comes."""
        self._late.put(None)
        self._thread.join()
        with contextlib.suppress(OSError):  # the other side may have ended it already
            self._connection.shutdown(socket.SHUT_WR)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # see send
            while (frame := self._late.get()) is not None:
                self._connection.sendall(frame)
                with self._order:
                    self._pending -= 1


def _read(connection: socket.socket, inbox: Inbox, closed: Callable[[], None], ending: threading.Event) -> None:
    """Put every message into the inbox, and at the end Closed; ``closed`` unless the engine is ``ending`` itself."""
    frames = Frames()
    error: AtlasError | None = None
    try:
        while data := connection.recv(_CHUNK):
            for payload in frames.feed(data):
                inbox.put(decode(payload))
    except OSError:
        pass  # a reset is an end like any other
    except AtlasError as malformed:
        error = malformed
    inbox.put(Closed(error))
    if error is None and not ending.is_set():
        closed()


def _next(inbox: Inbox) -> Message:
    message = inbox.get()
    if isinstance(message, Closed):
        raise message.error or EngineError("the API process went away before the engine was ready", state="gone")
    if isinstance(message, Compiled):
        raise EngineError("a grammar was compiled before there was an engine", "the engine is defective", "report it")
    return message


def _configuration(message: Message) -> Configure:
    if not isinstance(message, Configure):
        raise EngineError(f"{type(message).__name__} came instead of Configure", "the peer speaks another protocol")
    return message
