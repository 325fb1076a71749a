"""An answer taken apart: thought, text and calls of tools. One reader for streams and whole answers alike."""

import secrets
import string
from collections.abc import Iterable

from msgspec import Struct, field

from atlas_core.contracts.dialect import CallArguments, CallBegin, CallEnd, ReasoningSyntax, Text, Tool, ToolSyntax
from atlas_core.text.dialect.thought import Opening, Splitter

_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24


class Reading(Struct, frozen=True):
    """How to read answers. ``parallel``: calls after the first one count. ``named``: the request named the tool to call.

    ``call_prefix`` begins the ids of calls, unless the template wants ids of a length of its own.
    """

    tools: tuple[Tool, ...] = ()
    syntax: ToolSyntax | None = None
    reasoning: ReasoningSyntax | None = None
    parallel: bool = True
    named: bool = False
    call_prefix: str = "call_"


class Thought(Struct, frozen=True):
    """A piece of the model's reasoning."""

    text: str


class Call(Struct, frozen=True):
    """A call begins; ``index`` counts from 0 within the answer, ``id`` is unique."""

    index: int
    id: str
    name: str


class Arguments(Struct, frozen=True):
    """A piece of the arguments of call ``index``."""

    index: int
    text: str


AnswerEvent = Thought | Text | Call | Arguments


class AnswerReader:
    """Reads one answer, in pieces of any size."""

    def __init__(self, reading: Reading, opening: Opening) -> None:
        self.calls = 0
        self._reading = reading
        self._splitter = Splitter(reading.reasoning, opening) if reading.reasoning else None
        parses = reading.tools and reading.syntax
        self._parser = reading.syntax.parser(reading.tools) if parses and reading.syntax else None

    @property
    def plain(self) -> bool:
        """Whether every text is the answer's, as it is and at once."""
        return self._splitter is None and self._parser is None

    def push(self, text: str) -> list[AnswerEvent]:
        """What ``text`` adds."""
        if self._splitter is None:
            return self._answer(text)
        reasoning, content = self._splitter.push(text)
        return self._both(reasoning, content)

    def finish(self, *, cut: bool) -> list[AnswerEvent]:
        """The rest; ``cut`` when the answer ran into a limit."""
        events = [] if self._splitter is None else self._both(*self._splitter.finish())
        if self._parser is not None:
            events += self._numbered(self._parser.finish(cut=cut))
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's reason: an answer that calls ends because of that, unless it was cut, or the call was the client's choice."""
        return "tool_calls" if reason == "stop" and self.calls and not self._reading.named else reason

    def _both(self, reasoning: str, content: str) -> list[AnswerEvent]:
        thought: list[AnswerEvent] = [Thought(reasoning)] if reasoning else []
        return thought + self._answer(content)

    def _answer(self, text: str) -> list[AnswerEvent]:
        if not text:
            return []
        return [Text(text)] if self._parser is None else self._numbered(self._parser.push(text))

    def _numbered(self, events: Iterable[Text | CallBegin | CallArguments | CallEnd]) -> list[AnswerEvent]:
        found: list[AnswerEvent] = []
        for event in events:
            match event:
                case CallBegin(name):
                    self.calls += 1
                    call = Call(self.calls - 1, self._new_id(), name)
                    found += [call] if self._counts else []
                case CallArguments(text):
                    found += [Arguments(self.calls - 1, text)] if self._counts else []
                case Text():
                    found.append(event)
        return found

    @property
    def _counts(self) -> bool:
        return self.calls == 1 or self._reading.parallel

    def _new_id(self) -> str:
        length = self._reading.syntax.call_id_length if self._reading.syntax else 0
        letters = "".join(secrets.choice(_LETTERS) for _ in range(length or _ID_LENGTH))
        return letters if length else f"{self._reading.call_prefix}{letters}"


class Message(Struct):
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    finish_reason: str | None = None


def read_message(reading: Reading, opening: Opening, text: str, finish: str | None) -> Message:
    """The answer with ``text``, which ended for the reason ``finish``."""
    reader = AnswerReader(reading, opening)
    message = Message()
    for event in [*reader.push(text), *reader.finish(cut=finish == "length")]:
        match event:
            case Thought(piece):
                message.reasoning += piece
            case Text(piece):
                message.content += piece
            case Call():
                message.calls.append(event)
                message.arguments.append("")
            case Arguments(index, piece):
                message.arguments[index] += piece
    message.finish_reason = reader.finish_reason(finish)
    return message
