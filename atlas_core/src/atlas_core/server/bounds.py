"""What a client may take before anything is answered: headers and time."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas_core.vocab.errors import RequestError

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 2**10
SLOWEST = 16 * 2**10
"""Bytes a second that a body must come with, once it has taken its time."""


class Bounds:
    """ASGI middleware: few and short headers, and a body that comes."""

    def __init__(self, app: ASGIApp, body_timeout: float, clock: Callable[[], float]) -> None:
        """A body has ``body_timeout`` seconds, and longer only if it comes with SLOWEST bytes a second."""
        self._app = app
        self._timeout = body_timeout
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises RequestError of kind headers_too_large at once, and of kind too_slow where the body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise RequestError(
                "the headers are too large", f"at most {MAX_HEADERS} of {MAX_HEADER_BYTES} bytes together are read", "send fewer",
                kind="headers_too_large",
            )  # fmt: skip
        await self._app(scope, self._patient(receive), send)

    def _patient(self, receive: Receive) -> Receive:
        started = self._clock()
        came = 0
        complete = False

        async def timed() -> Message:
            nonlocal came, complete
            if complete:
                return await receive()
            left = started + self._timeout + came / SLOWEST - self._clock()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, left))
            except TimeoutError:
                raise RequestError(
                    "the body did not come in time", f"{came} bytes came in {self._clock() - started:.0f} s", "send it faster",
                    kind="too_slow",
                ) from None  # fmt: skip
            came += len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        return timed
