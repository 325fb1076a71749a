"""An answer put together from deltas: its items, and the events that tell of them. Streams and whole answers are made here alike."""

from collections.abc import Callable

from msgspec import Struct, field

from atlas_core.contracts.dialect import Text
from atlas_core.server.answer import AnswerEvent, AnswerReader, Arguments, Call, Thought
from atlas_core.server.logprobs import chat_logprobs
from atlas_core.server.responses.growing import (
    Event,
    Growing,
    GrowingCall,
    GrowingCustomCall,
    GrowingMessage,
    GrowingThought,
    Logprobs,
)
from atlas_core.server.responses.tools import Spaces
from atlas_core.server.store.port import Item
from atlas_core.server.turn import Turn
from atlas_core.vocab.messages import Delta, Position


class Shape(Struct, frozen=True):
    """How items shall look: tools that are ``custom`` or in ``spaces``, thoughts as ``summary``, or ``sealed`` to be sent back."""

    custom: frozenset[str] = frozenset()
    spaces: Spaces = field(default_factory=dict)
    summary: bool = False
    sealed: bool = False


class Assembly:
    """Takes the deltas of one answer. ``items`` are those that are done."""

    def __init__(self, turn: Turn, shape: Shape, new_id: Callable[[str], str]) -> None:
        self.items: list[Item] = []
        self._shape = shape
        self._new_id = new_id
        self._reader = AnswerReader(turn.reading, turn.prompt_of(0).opening)
        self._open: Growing | None = None
        self._tokens = _Tokens(turn.hidden) if turn.wants_logprobs else None

    def push(self, delta: Delta) -> list[Event]:
        """The events for ``delta``; behind the last one every item is done, and there is at least one."""
        if self._tokens is not None:
            self._tokens.push(delta.logprobs)
        events: list[Event] = []
        for found in self._reader.push(delta.text):
            events += self._take(found)
        if delta.finish is None:
            return events
        cut = delta.finish == "length"
        for found in self._reader.finish(cut=cut):
            events += self._take(found)
        if not self.items and self._open is None:
            events += self._begin(GrowingMessage(self._new_id("msg_"), 0))
        return events + self._end(cut=cut)

    def _take(self, found: AnswerEvent) -> list[Event]:
        index = len(self.items) + (self._open is not None)
        events: list[Event] = []
        match found:
            case Thought(text):
                thought = self._open
                if not isinstance(thought, GrowingThought):
                    shape = self._shape
                    thought = GrowingThought(self._new_id("rs_"), index, summary=shape.summary, sealed=shape.sealed)
                    events = self._begin(thought)
                self._logprobs(text, begins=bool(events))
                return events + thought.add(text)
            case Text(text):
                message = self._open
                if not isinstance(message, GrowingMessage):
                    message = GrowingMessage(self._new_id("msg_"), index)
                    events = self._begin(message)
                return events + message.add(text, self._logprobs(text, begins=bool(events)))
            case Call(_, call_id, name):
                space, own = self._shape.spaces.get(name, (None, name))
                if name in self._shape.custom:
                    return self._begin(GrowingCustomCall(self._new_id("ctc_"), index, call_id, own, space))
                return self._begin(GrowingCall(self._new_id("fc_"), index, call_id, own, space))
            case Arguments(_, text) if isinstance(self._open, GrowingCall | GrowingCustomCall):
                return self._open.add(text)
        return []

    def _logprobs(self, text: str, *, begins: bool) -> Logprobs:
        return [] if self._tokens is None else self._tokens.take(text, begins=begins)

    def _begin(self, item: Growing) -> list[Event]:
        events = self._end(cut=False)
        self._open = item
        return events + item.begin()

    def _end(self, *, cut: bool) -> list[Event]:
        if self._open is None:
            return []
        events, item = self._open.end(cut=cut)
        self._open = None
        self.items.append(item)
        return events


class _Tokens:
    """Tokens whose text has not come out yet. Text is shown as the model wrote it, so each piece is found among their bytes."""

    def __init__(self, hidden: frozenset[int]) -> None:
        self._hidden = hidden
        self._waiting: list[Position] = []

    def push(self, positions: tuple[Position, ...]) -> None:
        self._waiting += [position for position in positions if position.chosen.id not in self._hidden]

    def take(self, text: str, *, begins: bool) -> Logprobs:
        """The log-probabilities of the tokens of ``text``; where an item ``begins``, markup may stand before it."""
        data = text.encode()
        written = b"".join(position.chosen.bytes for position in self._waiting)
        start = written.rfind(data) if begins else written.find(data)
        if start < 0:
            return []
        end, at, taken = start + len(data), 0, []
        while self._waiting and at < end:
            position = self._waiting[0]
            at += len(position.chosen.bytes)
            if at > start:
                taken.append(position)
            self._waiting.pop(0)
        return chat_logprobs(taken, self._hidden)
