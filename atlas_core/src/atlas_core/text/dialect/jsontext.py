"""JSON as it is being written: values are passed on while they come, and quotes decide what is inside a string."""

import json
import re
from typing import Any

from atlas_core.text.dialect.reader import CallReader
from atlas_core.text.dialect.stream import MalformedError, Sink, Stream, Waits

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_STRUCTURE = re.compile(r'[^"\[\]{}]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]*")
_ESCAPES = frozenset('"\\/bfnrtu')
_ARGUMENTS = ("arguments", "parameters")
_OTHER = frozenset({"type", "id", "call_id", "index"})


def value(stream: Stream, sink: Sink) -> Waits[None]:
    """Read one value and give its text to ``sink``. Raises MalformedError when it has none, or no end.

    Control characters and unknown escapes inside strings, which models write now and then, are put right.
    """
    first = yield from stream.peek()
    if first == '"':
        yield from string(stream, sink)
    elif first in ("{", "["):
        yield from _container(stream, sink)
    else:
        read: list[str] = []
        yield from stream.take(_SCALAR, read.append)
        if not read:
            raise MalformedError(ended=not first)
        sink("".join(read))
        if stream.ended and stream.at >= len(stream.text):
            raise MalformedError(ended=True)


def string(stream: Stream, sink: Sink) -> Waits[None]:
    """Read one string with its quotes. Raises MalformedError when it has no end."""
    yield from stream.expect('"')
    sink('"')
    while True:
        yield from stream.take(_PLAIN, sink)
        char = yield from stream.peek()
        if not char:
            raise MalformedError(ended=True)
        if char == '"':
            stream.at += 1
            sink('"')
            return
        if char == "\\":
            pair = yield from stream.peek(2)
            if len(pair) < 2:
                raise MalformedError(ended=True)
            stream.at += 2
            sink(pair if pair[1] in _ESCAPES else "'" if pair[1] == "'" else "\\\\" + json.dumps(pair[1])[1:-1])
        else:
            stream.at += 1
            sink(json.dumps(char)[1:-1])


def text(stream: Stream) -> Waits[str]:
    """Read one string and give what it says. Raises MalformedError when there is none."""
    pieces: list[str] = []
    yield from string(stream, pieces.append)
    decoded = _loads("".join(pieces))
    if not isinstance(decoded, str):
        raise MalformedError
    return decoded


def _container(stream: Stream, sink: Sink) -> Waits[None]:
    depth = 0
    while True:
        yield from stream.take(_STRUCTURE, sink)
        char = yield from stream.peek()
        if not char:
            raise MalformedError(ended=True)
        if char == '"':
            yield from string(stream, sink)
            continue
        depth += 1 if char in "{[" else -1
        stream.at += 1
        sink(char)
        if depth == 0:
            return


def call_object(reader: CallReader, *, declared: bool) -> Waits[None]:
    """Read ``{"name": …, "arguments": …}``, in any order, and report the call.

    ``declared``: an object that names no tool of the request, or has keys that calls do not have, is MalformedError.
    """
    stream, out = reader.stream, reader.out
    calls = out.calls
    name: str | None = None
    early: list[str] | None = None
    yield from stream.expect("{")
    while True:
        yield from stream.skip_space()
        char = yield from stream.peek()
        if char in ("}", ","):
            stream.at += 1
            if char == "}":
                break
            continue
        key = yield from text(stream)
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        if key == "name" and name is None:
            name = yield from text(stream)
            if not name or (declared and name not in reader.tools):
                raise MalformedError
            if early is not None:
                out.begin(name)
                out.arguments("".join(early) or "{}")
        elif key in _ARGUMENTS and early is None and out.calls == calls:
            if name is None:
                early = []
                yield from _arguments(stream, early.append)
            else:
                out.begin(name)
                yield from _arguments(stream, out.arguments)
        elif declared and out.calls == calls and key not in _OTHER:
            raise MalformedError
        else:
            yield from value(stream, _ignore)
    if name is None:
        raise MalformedError
    if out.calls == calls:
        out.begin(name)
        out.arguments("{}")
    out.end()


def _arguments(stream: Stream, sink: Sink) -> Waits[None]:
    """Arguments: an object, null for none, or a string that holds either."""
    first = yield from stream.peek()
    if first == "{":
        yield from value(stream, sink)
        return
    pieces: list[str] = []
    yield from value(stream, pieces.append)
    written = "".join(pieces)
    inner = _loads(written) if first == '"' else None
    if written == "null" or (isinstance(inner, str) and not inner.strip()):
        sink("{}")
    else:
        sink(inner if isinstance(inner, str) and isinstance(_loads(inner), dict) else written)


def _loads(written: str) -> Any:
    try:
        found = json.loads(written)
        if isinstance(found, str):
            found.encode()  # half a surrogate pair cannot be sent
    except (ValueError, RecursionError):
        return None
    return found


def _ignore(piece: str) -> None:
    """A sink for members that calls do not have."""
