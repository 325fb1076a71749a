"""DeepSeek: R1 and V3 fence the arguments as a code block, V3.1 writes them bare, V3.2 and later use tags."""

import re
from collections.abc import Sequence

from atlas_core.contracts.dialect import Tool
from atlas_core.text.dialect.jsontext import value
from atlas_core.text.dialect.stream import MalformedError, Waits
from atlas_core.text.dialect.tags import DSML, TagParser

ALL, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, ALL_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
MARKERS = (ALL, CALL, SEPARATOR, CALL_END, ALL_END)
_WORD = re.compile(r"[^<\n{`]*")
_FENCE = re.compile(r"`*")
_LANGUAGE = re.compile(r"[a-z]*")


class DeepSeekParser(TagParser):
    """Reads every generation's spelling; which one it is shows at once."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(DSML, tools)
        self.openers = (*self.openers, ALL, CALL)

    def calls(self, opener: str) -> Waits[None]:
        """See CallReader."""
        if opener not in (ALL, CALL):
            yield from super().calls(opener)
            return
        stream = self.stream
        if opener == ALL:
            yield from stream.expect(ALL)
            yield from stream.skip_space()
        yield from self._one()
        while True:
            yield from stream.skip_space()
            mark = yield from stream.which((CALL, CALL_END, ALL_END, "```"))
            if mark is None:
                return
            if mark == CALL:
                stream.hold()
                yield from self._one()
            else:
                stream.at += len(mark)

    def _one(self) -> Waits[None]:
        stream, out = self.stream, self.out
        yield from stream.expect(CALL)
        name = yield from self._word()
        yield from stream.expect(SEPARATOR)
        yield from stream.skip_space()
        if (yield from stream.peek()) not in ("{", "`"):
            name = yield from self._word()  # the first word was the type, "function"
            yield from stream.skip_space()
        yield from stream.take(_FENCE, _ignore)
        yield from stream.take(_LANGUAGE, _ignore)
        yield from stream.skip_space()
        if not name or (yield from stream.peek()) != "{":
            raise MalformedError(ended=stream.ended and stream.at >= len(stream.text))
        out.begin(name)
        yield from value(stream, out.arguments)
        out.end()

    def _word(self) -> Waits[str]:
        read: list[str] = []
        yield from self.stream.take(_WORD, read.append)
        return "".join(read).strip()


def _ignore(piece: str) -> None:
    """A sink for the fence."""
