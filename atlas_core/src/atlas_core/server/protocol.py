"""The HTTP/1.1 protocol with limits on how long a connection may dawdle."""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from atlas_core.server.errors import answer_to, error_object
from atlas_core.vocab.errors import RequestError

SHORT_WAY = "atlas.response.piece"
"""The ASGI extension by which a piece of a stream goes out without a coroutine: see ``generation.ShortWay``."""
HEADER_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 60.0


def _refusal(error: RequestError) -> bytes:
    """A whole answer, for requests that never become one of the application's."""
    answer = answer_to(error)
    body = msgspec.json.encode(error_object(error))
    head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


_TOO_SLOW = _refusal(RequestError("the request did not come in time", "its head took too long", "", kind="too_slow"))
_NO_HTTP = _refusal(
    RequestError("the request is not understood", "it is no HTTP/1.1, or its head is too long", "", code="invalid_http")
)


class PatientProtocol(H11Protocol):
    """Closes connections whose next request does not come, or comes too slowly: uvicorn's own timer stops at the first byte.

    A connection has HEADER_TIMEOUT_S seconds from its start, or from the first byte of a later request, to the end of the head. A body
    that nobody reads any more, since the answer is out, has as long; one that is read is the application's business. A client that
    takes nothing of its answer for WRITE_TIMEOUT_S seconds, while what is written waits for it, is cut off.
    """

    header_timeout = HEADER_TIMEOUT_S
    write_timeout = WRITE_TIMEOUT_S

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._expiry: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._forget()
        self._unstick()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """A request may be complete: its answer, if it is a stream, then takes the short way out."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not None and self.cycle is not before:
            # The application has not begun yet; it will look the method up when it does.
            pieces = _Pieces(self.cycle, self.cycle.send)
            self.cycle.send = pieces.send  # type: ignore[method-assign]
            extensions: dict[str, Any] = self.cycle.scope.setdefault("extensions", {})
            extensions[SHORT_WAY] = pieces.write

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as everything is refused."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(_NO_HTTP)
        self.transport.close()

    def on_response_complete(self) -> None:
        """An answer is out."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        self._unstick()
        self._stuck = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._unstick()
        super().resume_writing()

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _watch(self) -> None:
        if not self._owes():
            self._forget()
        elif self._expiry is None:
            self._expiry = self.loop.call_later(self.header_timeout, self._expire)

    def _owes(self) -> bool:
        """Whether the client has to send something that nobody else waits for."""
        if self.transport.is_closing():
            return False
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete

    def _expire(self) -> None:
        self._expiry = None
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self.transport.write(_TOO_SLOW)
        self.transport.close()

    def _forget(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


class _Pieces:
    """Sends what an application says; pieces of a chunked body are framed here, since h11 takes longer for one than all else does."""

    def __init__(self, cycle: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        self._cycle = cycle
        self._send = send
        self._chunked = False

    def write(self, body: bytes) -> bool:
        """Send a piece now. False where it has to go through ``send``: the client is slow or gone, or it is no stream."""
        cycle = self._cycle
        if not self._chunked or cycle.flow.write_paused or cycle.disconnected:
            return False
        if body:  # an empty one would end the answer
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    async def send(self, message: Any) -> None:
        """See the ASGI specification."""
        cycle = self._cycle
        if self._chunked and message.get("more_body") and message["type"] == "http.response.body":
            while cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            self.write(message["body"])
            return
        self._chunked = False
        await self._send(message)
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            old = cycle.scope["http_version"] != "1.1"
            self._chunked = not (sized or old or cycle.scope["method"] == "HEAD" or message["status"] in (204, 304))
