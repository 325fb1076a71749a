"""Gemma 4: ``<|tool_call>call:name{key:value}<tool_call|>``; strings stand between quotes that are tokens of their own."""

import re
from typing import Any

from atlas_core.text.dialect.reader import CallReader
from atlas_core.text.dialect.stream import MalformedError, Waits
from atlas_core.text.dialect.typed import parameter_schema, quoted, to_json, types

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[^\s{}<>:]*")
_KEY = re.compile(r"[^:{}<>\[\],]*")
_BARE = re.compile(r"[^,{}\[\]<]*")
_SIMPLE = frozenset({"null", "boolean", "integer", "number", "string"})
_DEPTH = 64


class GemmaParser(CallReader):
    """Strings are passed on as they come; bare values follow the schema, inner ones their looks."""

    openers = (OPEN,)

    def calls(self, opener: str) -> Waits[None]:
        """See CallReader."""
        stream, out = self.stream, self.out
        yield from stream.expect(opener)
        yield from stream.expect("call:")
        read: list[str] = []
        yield from stream.take(_NAME, read.append)
        if not read or (yield from stream.peek()) != "{":
            raise MalformedError(ended=stream.ended and stream.at >= len(stream.text))
        name = "".join(read)
        out.begin(name)
        yield from self._object(self.tools.get(name, {}), _DEPTH)
        out.end()
        yield from stream.skip_space()
        if (yield from stream.which((CLOSE,))):
            stream.at += len(CLOSE)

    def _object(self, schema: Any, depth: int) -> Waits[None]:
        stream, out = self.stream, self.out
        yield from stream.expect("{")
        out.arguments("{")
        first = True
        while not (yield from self._end("}")):
            out.arguments("" if first else ", ")
            first = False
            key = ""
            if (yield from stream.which((QUOTE,))):
                yield from self._string()
            else:
                read: list[str] = []
                yield from stream.take(_KEY, read.append)
                key = "".join(read).strip()
                out.arguments(quoted(key))
            yield from stream.expect(":")
            out.arguments(": ")
            yield from self._value(parameter_schema(schema, key) if depth == _DEPTH else {}, schema, depth)
        out.arguments("}")

    def _array(self, depth: int) -> Waits[None]:
        out = self.out
        yield from self.stream.expect("[")
        out.arguments("[")
        first = True
        while not (yield from self._end("]")):
            out.arguments("" if first else ", ")
            first = False
            yield from self._value({}, {}, depth)
        out.arguments("]")

    def _end(self, bracket: str) -> Waits[bool]:
        """Pass white space and commas; True, and past it, when ``bracket`` comes. Raises MalformedError at the end of the text."""
        stream = self.stream
        while True:
            yield from stream.skip_space()
            char = yield from stream.peek()
            if char not in (",", bracket):
                if not char:
                    raise MalformedError(ended=True)
                return False
            stream.at += 1
            if char == bracket:
                return True

    def _value(self, schema: Any, root: Any, depth: int) -> Waits[None]:
        stream = self.stream
        if depth == 0:
            raise MalformedError
        yield from stream.skip_space()
        mark = yield from stream.which((QUOTE, "{", "["))
        if mark == QUOTE:
            yield from self._string()
        elif mark == "{":
            yield from self._object({}, depth - 1)
        elif mark == "[":
            yield from self._array(depth - 1)
        else:
            read: list[str] = []
            yield from stream.take(_BARE, read.append)
            char = yield from stream.peek()
            if not read or char not in (",", "}", "]"):
                raise MalformedError(ended=not char)
            admitted = types(schema, root) if schema else _SIMPLE
            self.out.arguments(to_json("".join(read).strip(), admitted))

    def _string(self) -> Waits[None]:
        stream, out = self.stream, self.out
        stream.at += len(QUOTE)
        out.arguments('"')
        if (yield from stream.find((QUOTE,), lambda piece: out.arguments(quoted(piece)[1:-1]))) is None:
            raise MalformedError(ended=True)
        stream.at += len(QUOTE)
        out.arguments('"')
