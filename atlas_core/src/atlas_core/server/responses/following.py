"""Sends the events of a response in the background to whoever asks, the earlier ones first."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atlas_core.server.endpoint import STREAM_HEADERS
from atlas_core.server.generation import while_connected
from atlas_core.server.responses.jobs import EventLog
from atlas_core.server.sse import PING


class LoggedEvents(Response):
    """An answer that is the events of ``log`` from number ``first`` on; see ``send_log``."""

    def __init__(self, log: EventLog, first: int, ping_interval: float) -> None:
        super().__init__()
        self._log = log
        self._first = first
        self._interval = ping_interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises ClientDisconnect when nobody waits for it any more."""
        await while_connected(receive, send_log(send, self._log, self._first, self._interval))


async def send_log(send: Send, log: EventLog, first: int, ping_interval: float) -> None:
    """The events of ``log`` from number ``first`` on until it ends; comments every ``ping_interval`` seconds without one."""
    await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
    events = log.read(first)
    waiting = asyncio.ensure_future(anext(events, b""))
    try:
        while True:
            await asyncio.wait({waiting}, timeout=ping_interval)
            data = waiting.result() if waiting.done() else PING
            if not data:
                break
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if waiting.done():
                waiting = asyncio.ensure_future(anext(events, b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await events.aclose()
