"""Calls as Python: ``[f(a=1, b="x"), g()]``, as Llama 3.2, Llama 4 and LFM2 write them."""

import ast
import json
import re

from atlas_core.text.dialect.reader import CallReader
from atlas_core.text.dialect.stream import MalformedError, Sink, Waits
from atlas_core.text.dialect.typed import quoted

MARKERS = ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>")
_NAME = re.compile(r"[\w.\-]*")
_KEYWORD = re.compile(r"\w*")
_PLAIN = re.compile(r"""[^"'\\]*""")
_VALUE = re.compile(r"""[^"'()\[\]{},\\]*""")
_HEX = {"x": 2, "u": 4, "U": 8}
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}


class PythonicParser(CallReader):
    """A list is one of calls if its first names a tool of the request; it stands at the beginning or behind a marker."""

    openers = ("<|python_start|>", "<|tool_call_start|>", "<|python_tag|>")

    def run(self) -> Waits[None]:
        """See CallReader: the beginning of the answer is an opener too."""
        yield from self.attempt("")
        yield from super().run()

    def calls(self, opener: str) -> Waits[None]:
        """See CallReader."""
        stream = self.stream
        yield from stream.expect(opener)
        yield from stream.skip_space()
        while (marker := (yield from stream.which(MARKERS))) is not None:
            stream.at += len(marker)
            yield from stream.skip_space()
        yield from stream.expect("[")
        yield from self._call()
        while True:
            yield from stream.skip_space()
            mark = yield from stream.which((",", "]"))
            if mark is None:
                return
            stream.at += 1
            if mark == "]":
                break
            stream.hold()
            yield from self._call()
        yield from stream.skip_space()
        marker = yield from stream.which(MARKERS)
        if marker in ("<|python_end|>", "<|tool_call_end|>"):
            stream.at += len(marker)

    def _call(self) -> Waits[None]:
        stream, out = self.stream, self.out
        yield from stream.skip_space()
        read: list[str] = []
        yield from stream.take(_NAME, read.append)
        name = "".join(read)
        if name not in self.tools:
            raise MalformedError(ended=stream.ended and stream.at >= len(stream.text))
        yield from stream.expect("(")
        out.begin(name)
        out.arguments("{")
        first = True
        while True:
            yield from stream.skip_space()
            char = yield from stream.peek()
            if char == ")":
                stream.at += 1
                break
            if char == ",":
                stream.at += 1
                continue
            yield from self._argument(first)
            first = False
        out.arguments("}")
        out.end()

    def _argument(self, first: bool) -> Waits[None]:
        stream, out = self.stream, self.out
        read: list[str] = []
        yield from stream.take(_KEYWORD, read.append)
        yield from stream.skip_space()
        yield from stream.expect("=")
        yield from stream.skip_space()
        out.arguments(("" if first else ", ") + quoted("".join(read)) + ": ")
        quote = yield from stream.peek()
        if quote and quote in "\"'":
            yield from self._string(quote)
            return
        pieces: list[str] = []
        yield from self._expression(pieces.append)
        out.arguments(_literal("".join(pieces)))

    def _string(self, quote: str) -> Waits[None]:
        """A string, passed on as JSON while it comes. Raises MalformedError when it has no end."""
        stream, out = self.stream, self.out
        if (yield from stream.which((quote * 3,))):
            quote *= 3
        stream.at += len(quote)
        out.arguments('"')
        while True:
            yield from stream.take(_PLAIN, lambda piece: out.arguments(quoted(piece)[1:-1]))
            char = yield from stream.peek()
            if not char:
                raise MalformedError(ended=True)
            if char == "\\":
                out.arguments(quoted((yield from self._escape()))[1:-1])
            elif (yield from stream.which((quote,))):
                stream.at += len(quote)
                out.arguments('"')
                return
            else:
                stream.at += 1
                out.arguments(quoted(char)[1:-1])

    def _escape(self) -> Waits[str]:
        stream = self.stream
        pair = yield from stream.peek(2)
        if len(pair) < 2:
            raise MalformedError(ended=True)
        stream.at += 2
        kind = pair[1]
        if kind in _HEX:
            digits = yield from stream.peek(_HEX[kind])
            if re.fullmatch(r"[0-9a-fA-F]+", digits) and len(digits) == _HEX[kind]:
                code = int(digits, 16)
                if code < 0xD800 or 0xE000 <= code <= 0x10FFFF:
                    stream.at += len(digits)
                    return chr(code)
            return pair
        return _SHORT.get(kind, kind if kind in "\\\"'" else pair)

    def _expression(self, sink: Sink) -> Waits[None]:
        """Any other value, up to the comma or bracket that ends it. Raises MalformedError when there is none."""
        stream = self.stream
        depth = 0
        while True:
            yield from stream.take(_VALUE, sink)
            char = yield from stream.peek()
            if not char:
                raise MalformedError(ended=True)
            if depth == 0 and char in ",)":
                return
            if char in "\"'":
                yield from self._quoted(char, sink)
                continue
            depth += (char in "([{") - (char in ")]}")
            if depth < 0:
                raise MalformedError
            stream.at += 1
            sink(char)

    def _quoted(self, quote: str, sink: Sink) -> Waits[None]:
        """A string inside a larger value, as it is written."""
        stream = self.stream
        stream.at += 1
        sink(quote)
        while True:
            yield from stream.take(_PLAIN, sink)
            piece = yield from stream.peek()
            if piece == "\\":
                piece = yield from stream.peek(2)
            if not piece or piece == "\\":
                raise MalformedError(ended=True)
            stream.at += len(piece)
            sink(piece)
            if piece == quote:
                return


def _literal(text: str) -> str:
    """A Python or JSON literal as JSON; what is neither is a string."""
    for read in (ast.literal_eval, json.loads):
        try:
            written = json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
            written.encode()  # half a surrogate pair cannot be sent
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return written
    return quoted(text.strip())
