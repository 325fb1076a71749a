"""GLM-4.5 and later: a name, then keys and values in tags of their own."""

import re

from atlas_core.text.dialect.reader import CallReader
from atlas_core.text.dialect.stream import MalformedError, Waits
from atlas_core.text.dialect.typed import Value, parameter_schema, quoted, types

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<>{}\"]*")
_UNTIL_TAG = re.compile(r"[^<]*")


class Glm4Parser(CallReader):
    """Values keep their white space. A value's closing tag counts where a key or the end of the call follows."""

    openers = (OPEN,)

    def calls(self, opener: str) -> Waits[None]:
        """See CallReader."""
        stream, out = self.stream, self.out
        yield from stream.expect(opener)
        yield from stream.skip_space()
        read: list[str] = []
        yield from stream.take(_NAME, read.append)
        name = "".join(read)
        yield from stream.skip_space()
        tag = yield from stream.which((_KEY, CLOSE))
        if not name or tag is None:
            raise MalformedError(ended=stream.ended and stream.at >= len(stream.text))
        out.begin(name)
        out.arguments("{")
        given: set[str] = set()
        while (yield from stream.which((_KEY, CLOSE))) == _KEY:
            yield from self._argument(name, given)
            yield from stream.skip_space()
        if not (yield from stream.peek()) and stream.cut:
            raise MalformedError(ended=True)
        out.arguments("}")
        out.end()
        if (yield from stream.which((CLOSE,))):
            stream.at += len(CLOSE)

    def _argument(self, name: str, given: set[str]) -> Waits[None]:
        stream = self.stream
        stream.at += len(_KEY)
        read: list[str] = []
        yield from stream.take(_UNTIL_TAG, read.append)
        key = "".join(read).strip()
        for tag in (_KEY_END, _VALUE):
            if (yield from stream.which((tag,))):
                stream.at += len(tag)
            elif not (yield from stream.peek()) and stream.cut:
                raise MalformedError(ended=True)
            if tag == _KEY_END:
                yield from stream.skip_space()
        schema = self.tools.get(name, {})
        sink = _ignore if key in given else self.out.arguments
        sink((", " if given else "") + quoted(key) + ": ")
        given.add(key)
        value = Value(types(parameter_schema(schema, key), schema), sink)
        while True:
            yield from stream.take(_UNTIL_TAG, value.add)
            if not (yield from stream.peek()):
                break
            end = yield from stream.which((_VALUE_END, CLOSE))
            follows = (_KEY, CLOSE) if end == _VALUE_END else (OPEN,)
            if end and (yield from stream.space_then(follows, len(end))):
                stream.at += len(end) if end == _VALUE_END else 0
                value.close()
                return
            value.add("<")
            stream.at += 1
        if stream.cut:
            value.cut()
            raise MalformedError(ended=True)
        value.close()


def _ignore(piece: str) -> None:
    """A sink for a key that came already."""
