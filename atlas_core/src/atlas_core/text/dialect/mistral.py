"""Mistral: ``[TOOL_CALLS]``, then either a JSON array of calls or a name, ``[ARGS]`` and the arguments."""

import re

from atlas_core.text.dialect.jsontext import call_object, value
from atlas_core.text.dialect.reader import CallReader
from atlas_core.text.dialect.stream import MalformedError, Waits

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.:\-]*")


class MistralParser(CallReader):
    """Ids that the model writes are passed over: ids are the server's."""

    openers = (OPEN,)

    def calls(self, opener: str) -> Waits[None]:
        """See CallReader."""
        stream = self.stream
        yield from stream.expect(opener)
        yield from stream.skip_space()
        first = yield from stream.peek()
        if first not in ("[", "{"):
            yield from self._named()
            return
        if first == "[":
            stream.at += 1
        while True:
            yield from stream.skip_space()
            char = yield from stream.peek()
            if char in (",", "]"):
                stream.at += 1
                if char == "]":
                    return
            elif char == "{":
                yield from self.mended(call_object(self, declared=False))
                stream.hold()
            elif self.out.calls:
                return
            else:
                raise MalformedError(ended=not char)

    def _named(self) -> Waits[None]:
        stream, out = self.stream, self.out
        name = yield from self._word()
        yield from stream.skip_space()
        mark = yield from stream.which((CALL_ID, ARGUMENTS, "{"))
        if mark == CALL_ID:
            stream.at += len(CALL_ID)
            yield from self._word()
            mark = yield from stream.which((ARGUMENTS,))
        if not name or mark is None:
            raise MalformedError(ended=stream.ended and stream.at >= len(stream.text))
        if mark == ARGUMENTS:
            stream.at += len(ARGUMENTS)
        out.begin(name)
        yield from stream.skip_space()
        yield from value(stream, out.arguments)
        out.end()

    def _word(self) -> Waits[str]:
        read: list[str] = []
        yield from self.stream.take(_NAME, read.append)
        return "".join(read)
