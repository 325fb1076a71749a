"""What all parsers of tool calls share: text goes through until a marker opens calls, and markup that fails is text again."""

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_core.contracts.dialect import CallArguments, CallBegin, CallEnd, Text, Tool, ToolEvent
from atlas_core.text.dialect.stream import MalformedError, Stream, Waits


class Emitter:
    """Collects events; pieces that follow one another are joined, and white space next to calls is dropped."""

    def __init__(self, stream: Stream) -> None:
        self.calling = False
        self.calls = 0
        self._stream = stream
        self._events: list[ToolEvent] = []
        self._space = ""
        self._behind_call = False

    def text(self, piece: str) -> None:
        """Text of the answer."""
        if self._behind_call:
            piece = piece.lstrip()
        if not piece:
            return
        self._behind_call = False
        piece = self._space + piece
        shown = piece.rstrip()
        self._space = piece[len(shown) :]
        self._add(Text(shown))

    def begin(self, name: str) -> None:
        """A call begins; from here on there is no way back."""
        self._stream.release()
        self._space = ""
        self.calling = True
        self.calls += 1
        self._events.append(CallBegin(name))

    def arguments(self, piece: str) -> None:
        """Arguments of the open call."""
        self._add(CallArguments(piece))

    def end(self, *, complete: bool = True) -> None:
        """The open call is done, or breaks off."""
        if complete:
            self._events.append(CallEnd())
        self.calling = False
        self._behind_call = True

    def take(self) -> list[ToolEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Show the space that was held back."""
        if self._space and not self._behind_call:
            self._add(Text(self._space))
            self._space = ""

    def _add(self, event: Text | CallArguments) -> None:
        if not event.text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, type(event)):
            self._events[-1] = type(event)(last.text + event.text)
        else:
            self._events.append(event)


class CallReader:
    """A ToolParser. Subclasses name the ``openers`` and read what follows one."""

    openers: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools: Mapping[str, Mapping[str, Any]] = {tool.name: tool.parameters for tool in tools}
        self.stream = Stream()
        self.out = Emitter(self.stream)
        self._routine = self.run()
        self._done = False

    def push(self, text: str) -> list[ToolEvent]:
        """See ToolParser."""
        self.stream.feed(text)
        self._advance()
        return self.out.take()

    def finish(self, *, cut: bool) -> list[ToolEvent]:
        """See ToolParser."""
        self.stream.end(cut=cut)
        self._advance()
        self.out.close()
        return self.out.take()

    def run(self) -> Waits[None]:
        """Read everything."""
        stream = self.stream
        while True:
            opener = yield from stream.find(self.openers, self.out.text)
            if opener is None:
                return
            yield from self.attempt(opener)

    def attempt(self, opener: str) -> Waits[bool]:
        """Read calls that begin with ``opener``; when they are none, show it as text and tell so."""
        stream, out = self.stream, self.out
        before = out.calls
        stream.hold()
        try:
            yield from self.calls(opener)
        except MalformedError as failure:
            cut = failure.ended and stream.cut
            if out.calling:
                out.end(complete=not cut)
            stream.back()
            if cut:
                stream.at = len(stream.text)
            elif out.calls == before:
                out.text(opener)
                stream.at += len(opener)
        finally:
            stream.release()
        return out.calls > before

    def calls(self, opener: str) -> Waits[None]:
        """Read from ``opener``, which is still to be read, to the end of the calls.

        Raises MalformedError: what was read since ``stream.hold`` is text, unless ``out.begin`` came in between; then the call
        ends where it stands.
        """
        raise NotImplementedError

    def mended(self, call: Waits[None]) -> Waits[None]:
        """Read a ``call``; one that goes wrong in the middle ends there, and what follows is read as if it were whole."""
        try:
            yield from call
        except MalformedError as failure:
            if failure.ended or not self.out.calling:
                raise
            self.out.end()

    def _advance(self) -> None:
        if self._done:
            self.stream.at = len(self.stream.text)
            return
        try:
            next(self._routine)
        except StopIteration:
            self._done = True
