"""The API process's socket to the engine, as an asyncio protocol."""

import asyncio
from collections.abc import Callable

from atlas_core.engine.wire import Frames, Message, decode

_BUFFER = 1 << 16


class Connection(asyncio.BufferedProtocol):
    """Messages are handled in the callback that their bytes come with: a task that reads would have to be woken for every step.

    A protocol with a buffer of its own, since asyncio takes 256 KB from the system for every read and gives them back.
    """

    transport: asyncio.Transport

    def __init__(self, made: "asyncio.Future[Connection] | None" = None) -> None:
        """``made`` gets the first connection; one that comes after it is closed."""
        self._made = made
        self._buffer = memoryview(bytearray(_BUFFER))
        self._frames = Frames()
        self._early = bytearray()
        self._take: Callable[[Message], None] | None = None
        self._failed: Callable[[Exception], None]
        self._ended: Callable[[], None]
        self._over = False

    def begin(
        self, take: Callable[[Message], None], failed: Callable[[Exception], None], ended: Callable[[], None]
    ) -> None:
        """From now on ``take`` gets every message, those that have come already first.

        What it raises, or a message that is none, is told to ``failed`` and ends the connection; at its end, however it
        comes, ``ended`` is called.
        """
        self._take, self._failed, self._ended = take, failed, ended
        early, self._early = bytes(self._early), bytearray()
        self._received(early)
        if self._over:
            ended()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BufferedProtocol."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._made is not None:
            if self._made.done():
                transport.abort()
            else:
                self._made.set_result(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        self._received(self._buffer[:nbytes])

    def _received(self, data: bytes | memoryview) -> None:
        if self._take is None:
            self._early += data
            return
        try:
            for payload in self._frames.feed(data):
                self._take(decode(payload))
        except Exception as error:  # noqa: BLE001 - whatever it is, the connection is of no more use
            self._failed(error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BufferedProtocol. Why is of no interest: an engine that dies with a message unread resets the connection."""
        self._over = True
        if self._take is not None:
            self._ended()
