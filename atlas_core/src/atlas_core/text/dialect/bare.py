"""Calls as JSON objects without tags: Llama 3, and models that were told to answer so."""

from collections.abc import Sequence

from atlas_core.contracts.dialect import Tool
from atlas_core.text.dialect.jsontext import call_object
from atlas_core.text.dialect.reader import CallReader
from atlas_core.text.dialect.stream import MalformedError, Waits

PYTHON_TAG = "<|python_tag|>"


class BareParser(CallReader):
    """An object is a call if it names a tool of the request, at the beginning of the answer or behind ``<|python_tag|>``.

    ``lines``: also at the beginning of any later line. Several calls stand side by side, in an array, or divided by ``;``.
    """

    def __init__(self, tools: Sequence[Tool], *, lines: bool) -> None:
        self.openers = (PYTHON_TAG, "\n") if lines else (PYTHON_TAG,)
        super().__init__(tools)

    def run(self) -> Waits[None]:
        """See CallReader: the beginning of the answer is an opener too."""
        yield from self.attempt("")
        yield from super().run()

    def calls(self, opener: str) -> Waits[None]:
        """See CallReader."""
        stream, out = self.stream, self.out
        before = out.calls
        yield from stream.expect(opener)
        while True:
            yield from stream.skip_space()
            tag = yield from stream.which((PYTHON_TAG, "{", "[", ",", ";", "]"))
            if tag == "{":
                yield from self.mended(call_object(self, declared=True))
                stream.hold()
            elif (
                tag == PYTHON_TAG
                or (tag == "[" and out.calls == before)
                or (tag and tag in ",;]" and out.calls > before)
            ):
                stream.at += len(tag)
            elif out.calls > before:
                return
            else:
                raise MalformedError(ended=stream.ended and stream.at >= len(stream.text))
