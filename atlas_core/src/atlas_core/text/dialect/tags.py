"""Calls as nested tags, one for each parameter, whose values are bare text: Qwen3-Coder, MiniMax-M2, DeepSeek V3.2."""

import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from atlas_core.contracts.dialect import Tool
from atlas_core.text.dialect.reader import CallReader
from atlas_core.text.dialect.stream import MalformedError, Sink, Waits
from atlas_core.text.dialect.typed import Value, parameter_schema, quoted, types

_NAME = re.compile(r"[^<>\n]*")
_QUOTED = re.compile(r"[^<>\n\"]*")
_UNTIL_TAG = re.compile(r"[^<\n]*")
_JUNK = re.compile(r"[^<]*")
_MAX_NAME = 256


class Tags(Struct, frozen=True):
    """The spelling. ``call`` and ``parameter`` are what stands before and behind the name, and the closing tag.

    ``layout``: one line break behind a value's opening tag and one before its closing tag are not part of it. ``attribute``
    introduces ``="true"`` or ``="false"`` before the tag's end: whether the value is a string or JSON.
    """

    outer: tuple[tuple[str, str], ...]
    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    layout: bool = False
    attribute: str = ""

    @property
    def opening(self) -> tuple[str, ...]:
        """Outer opening tags."""
        return tuple(pair[0] for pair in self.outer)

    @property
    def closing(self) -> tuple[str, ...]:
        """Outer closing tags."""
        return tuple(pair[1] for pair in self.outer)


QWEN3_CODER = Tags(
    (("<tool_call>", "</tool_call>"),),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
    layout=True,
)
MINIMAX = Tags(
    (("<minimax:tool_call>", "</minimax:tool_call>"),),
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
)
DSML = Tags(
    (
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    ('<｜DSML｜parameter name="', ">", "</｜DSML｜parameter>"),
    attribute='" string=',
)


class TagParser(CallReader):
    """A call without its outer tag is one if it names a tool of the request. A closing tag counts where markup goes on behind it."""

    def __init__(self, tags: Tags, tools: Sequence[Tool]) -> None:
        self.tags = tags
        self.openers = (*tags.opening, tags.call[0])
        super().__init__(tools)

    def calls(self, opener: str) -> Waits[None]:
        """See CallReader."""
        stream, tags = self.stream, self.tags
        inside = opener in tags.opening
        if inside:
            yield from stream.expect(opener)
            yield from stream.skip_space()
        yield from self._call(declared=not inside)
        while True:
            yield from stream.skip_space()
            tag = yield from stream.which((tags.call[0], tags.call[2], tags.parameter[2], *tags.closing))
            if tag is None:
                return
            if tag == tags.call[0]:
                stream.hold()
                yield from self._call(declared=not inside)
            else:
                inside = inside and tag not in tags.closing
                stream.at += len(tag)

    def _call(self, *, declared: bool) -> Waits[None]:
        stream, out, tags = self.stream, self.out, self.tags
        yield from stream.expect(tags.call[0])
        name = yield from self._name(tags.call[1])
        if declared and name not in self.tools:
            raise MalformedError
        out.begin(name)
        out.arguments("{")
        given: set[str] = set()
        ends = (tags.call[0], tags.call[2], *tags.opening, *tags.closing)
        while True:
            yield from stream.skip_space()
            tag = yield from stream.which((tags.parameter[0], tags.parameter[2], *ends))
            if tag == tags.parameter[0]:
                yield from self._parameter(name, given)
            elif tag == tags.parameter[2]:
                stream.at += len(tag)
            elif tag is not None:
                stream.at += len(tag) if tag == tags.call[2] else 0
                break
            elif not (yield from self._skip_junk()):
                break
        out.arguments("}")
        out.end()

    def _skip_junk(self) -> Waits[bool]:
        """Pass what has no place between parameters; False at the end of the text. Raises MalformedError when that was a cut."""
        stream = self.stream
        if not (yield from stream.peek()):
            if stream.cut:
                raise MalformedError(ended=True)
            return False
        stream.at += 1
        yield from stream.take(_JUNK, _ignore)
        return True

    def _name(self, end: str) -> Waits[str]:
        """A name and the rest of its tag. Raises MalformedError when it is none."""
        read: list[str] = []
        yield from self.stream.take(_QUOTED if end[0] == '"' else _NAME, read.append)
        yield from self.stream.expect(end)
        name = "".join(read).strip().strip("\"'")
        if not name or len(name) > _MAX_NAME:
            raise MalformedError
        return name

    def _parameter(self, call: str, given: set[str]) -> Waits[None]:
        stream, tags = self.stream, self.tags
        schema = self.tools.get(call, {})
        stream.at += len(tags.parameter[0])
        try:
            key = yield from self._name(tags.parameter[1])
        except MalformedError as failure:
            if failure.ended and stream.cut:
                raise
            return  # no parameter without a name; what follows is passed as junk
        admitted = None
        if tags.attribute:
            key, _, told = key.partition(tags.attribute)
            admitted = frozenset({"string"}) if "true" in told else None
        # A name that comes twice would be a member that comes twice: the first one counts.
        sink: Sink = _ignore if key in given else self.out.arguments
        sink((", " if given else "") + quoted(key) + ": ")
        given.add(key)
        value = Value(admitted or types(parameter_schema(schema, key), schema), sink)
        try:
            yield from self._value(_Lines(value, tags.layout), schema, given)
        except MalformedError:
            value.cut()
            raise
        value.close()

    def _value(self, lines: "_Lines", schema: Any, given: set[str]) -> Waits[None]:
        stream = self.stream
        if self.tags.layout and (yield from stream.peek()) == "\n":
            stream.at += 1
        while True:
            yield from stream.take(_UNTIL_TAG, lines.text)
            char = yield from stream.peek()
            if char == "\n":
                lines.line_break()
                stream.at += 1
                continue
            if not char and stream.cut:
                raise MalformedError(ended=True)
            closing = (yield from self._closes(schema, given, at_line_start=lines.at_start)) if char else 0
            if closing is not None:
                stream.at += closing
                lines.close()
                return
            lines.text("<")
            stream.at += 1

    def _closes(self, schema: Any, given: set[str], *, at_line_start: bool) -> Waits[int | None]:
        """How many characters of closing tag stand here; 0 when the value ends without one, None when it goes on."""
        stream, tags = self.stream, self.tags
        tag = yield from stream.which((tags.parameter[2], tags.call[2], tags.parameter[0], *tags.closing))
        if tag is None:
            return None
        outer = (tags.call[0], *tags.opening, *tags.closing)
        if tag == tags.parameter[2]:
            goes_on = yield from stream.space_then(
                (tags.parameter[0], tags.parameter[2], tags.call[2], *outer), len(tag)
            )
            return len(tag) if goes_on else None
        if tag == tags.parameter[0]:
            if not at_line_start or not isinstance(schema.get("properties"), dict):
                return None
            options = [tag + name + tags.parameter[1] for name in schema["properties"] if name not in given]
            found = (yield from stream.which(options)) if options else None
            return 0 if found else None
        follows = outer if tag == tags.call[2] else tags.opening
        return 0 if (yield from stream.space_then(follows, len(tag))) else None


class _Lines:
    """A value whose last line break is held back, since it may be layout."""

    def __init__(self, value: Value, layout: bool) -> None:
        self.at_start = False
        self._value = value
        self._layout = layout

    def text(self, piece: str) -> None:
        """Text without line breaks."""
        self._value.add("\n" + piece if self.at_start else piece)
        self.at_start = False

    def line_break(self) -> None:
        """One line break."""
        if self.at_start:
            self._value.add("\n")
        self.at_start = True

    def close(self) -> None:
        """The closing tag came."""
        if self.at_start and not self._layout:
            self._value.add("\n")


def _ignore(piece: str) -> None:
    """A sink for what has no place in a call."""
