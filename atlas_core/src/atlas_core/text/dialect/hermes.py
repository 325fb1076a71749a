"""Hermes: a JSON object with name and arguments between tags, ``<tool_call>`` and ``</tool_call>``."""

from atlas_core.text.dialect.jsontext import call_object
from atlas_core.text.dialect.reader import CallReader
from atlas_core.text.dialect.stream import Waits

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallReader):
    """The closing tag counts outside JSON strings only; a tag that is not followed by an object is text."""

    openers = (OPEN,)

    def calls(self, opener: str) -> Waits[None]:
        """See CallReader."""
        stream = self.stream
        yield from stream.expect(opener)
        yield from stream.skip_space()
        yield from self.mended(call_object(self, declared=False))
        while True:
            yield from stream.skip_space()
            tag = yield from stream.which((CLOSE, "{"))
            if tag is None:
                return
            if tag == CLOSE:
                stream.at += len(CLOSE)
            else:
                stream.hold()
                yield from self.mended(call_object(self, declared=False))
