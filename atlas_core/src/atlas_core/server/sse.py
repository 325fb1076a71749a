"""Server-sent events: framing, and templates that make a chunk of a stream by joining bytes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from atlas_core.server.errors import error_object
from atlas_core.vocab.errors import AtlasError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment: clients skip it, and proxies see that the connection lives."""

encode = msgspec.json.Encoder().encode


def event(payload: bytes) -> bytes:
    """One event. Raises ValueError for a payload with a line break, which would end the event early."""
    if b"\n" in payload or b"\r" in payload:
        raise ValueError("the payload of an event is one line")
    return b"data: " + payload + b"\n\n"


class Chunks:
    """What all streams of chunks have in common: nothing before the first, comments as pings, errors as OpenAI's object."""

    ping = PING

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def failed(self, error: AtlasError) -> bytes:
        """The error, without the DONE mark: SDKs raise it."""
        return event(encode(error_object(error)))


class ChunkTemplate:
    """Events of one stream, which differ in their single choice only.

    ``envelope`` are the members before ``choices``. With ``usage_null`` every chunk says ``"usage":null``, as clients that
    asked for usage expect of all chunks but the last.
    """

    def __init__(self, envelope: Mapping[str, Any], *, usage_null: bool) -> None:
        self._head = b"data: " + encode(envelope)[:-1] + b',"choices":['
        self._tail = (b',"usage":null}' if usage_null else b"}") + b"\n\n"

    def round(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """What stands before and behind the one part that differs of chunks whose choice is ``before``, that part and ``after``."""
        return self._head + before, after + b"]" + self._tail

    def choice(self, choice: bytes, more: bytes = b"") -> bytes:
        """A chunk with one choice, a JSON object; ``more`` are members behind the choices, each with its comma before it."""
        return self._head + choice + b"]" + more + self._tail

    def closing(self, usage: Mapping[str, int | Mapping[str, int]]) -> bytes:
        """The chunk behind the last choice: no choices, but the usage."""
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n"
