"""Where thoughts end and the answer begins. The state comes from the end of the prompt; after that, a small machine over text."""

from enum import Enum, auto
from typing import Literal, NamedTuple

from atlas_core.contracts.dialect import ReasoningSyntax

Opening = Literal["open", "closed", "unsaid"]


class Place(Enum):
    """Where the text is: not known yet, in the thought, in the answer."""

    UNSAID = auto()
    THOUGHT = auto()
    ANSWER = auto()


class Part(NamedTuple):
    """A piece of text. ``mark``: it is a tag, with the white space before an opening one."""

    place: Place
    text: str
    mark: bool = False


def opening(prompt: str, syntax: ReasoningSyntax) -> Opening:
    """What the end of a rendered ``prompt`` says: it opened a thought, closed one, or neither. Earlier tags do not count."""
    tail = prompt.rstrip()
    if tail.endswith(syntax.start.rstrip()):
        return "open"
    return "closed" if tail.endswith(syntax.end.rstrip()) else "unsaid"


def continued(text: str, syntax: ReasoningSyntax) -> Opening:
    """The same for an answer that goes on after ``text``: its own beginning."""
    if syntax.start.rstrip() not in text and syntax.end not in text:
        return "closed" if text.strip() else "unsaid"
    return "open" if text.rfind(syntax.start.rstrip()) > text.rfind(syntax.end) else "closed"


class Thought:
    """Cuts an answer into parts; joined, they are the answer. What may be half a tag is held back."""

    def __init__(self, syntax: ReasoningSyntax, *, opened: bool) -> None:
        """``opened``: the prompt has opened a thought already; else the answer may."""
        self.place = Place.THOUGHT if opened else Place.UNSAID
        self._syntax = syntax
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """The parts that ``text`` completes."""
        if self.place is Place.ANSWER:
            return [Part(Place.ANSWER, text)] if text else []
        self._held += text
        parts: list[Part] = []
        self.place = place = self._begin(parts) if self.place is Place.UNSAID else self.place
        if place is Place.THOUGHT:
            self._think(parts)
        elif place is Place.ANSWER:
            parts.append(Part(Place.ANSWER, self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """What was held: text of where it stands."""
        held, self._held = self._held, ""
        place = Place.ANSWER if self.place is Place.UNSAID else self.place
        return [Part(place, held)] if held else []

    def _begin(self, parts: list[Part]) -> Place:
        start = self._syntax.start
        written = self._held.lstrip()
        if written.startswith(start):
            end = len(self._held) - len(written) + len(start)
            parts.append(Part(Place.THOUGHT, self._held[:end], mark=True))
            self._held = self._held[end:]
            return Place.THOUGHT
        return Place.UNSAID if start.startswith(written) else Place.ANSWER

    def _think(self, parts: list[Part]) -> None:
        end = self._syntax.end
        thought, found, rest = self._held.partition(end)
        if not found:
            held = overlap(thought, end)
            thought, self._held = thought[: len(thought) - held], thought[len(thought) - held :]
        if thought:
            parts.append(Part(Place.THOUGHT, thought))
        if found:
            parts.append(Part(Place.THOUGHT, end, mark=True))
            self._held = ""
            self.place = Place.ANSWER
            if rest:
                parts.append(Part(Place.ANSWER, rest))


class Split(NamedTuple):
    """New text of the thought and of the answer."""

    reasoning: str
    content: str


class Splitter:
    """Thought and answer apart, without tags and the line breaks next to them.

    Once a thought was closed, a further closing tag changes nothing and is not shown.
    """

    def __init__(self, syntax: ReasoningSyntax, state: Opening) -> None:
        self._end = syntax.end
        self._thought = None if state == "closed" else Thought(syntax, opened=state == "open")
        self._closed = state == "closed"
        self._fresh = state == "closed"  # nothing of the answer was shown since the closing tag
        self._began = False
        self._breaks = ""
        self._held = ""

    def push(self, text: str) -> Split:
        """What ``text`` adds."""
        parts = [Part(Place.ANSWER, text)] if self._thought is None else self._thought.push(text)
        return self._sort(parts)

    def finish(self) -> Split:
        """The rest."""
        reasoning, content = self._sort([] if self._thought is None else self._thought.finish())
        if self._breaks and not self._closed:
            reasoning += self._breaks
        return Split(reasoning, content + self._held)

    def _sort(self, parts: list[Part]) -> Split:
        reasoning, content = "", ""
        for part in parts:
            if part.place is Place.ANSWER:
                content += self._answer(part.text)
            elif not part.mark:
                reasoning += self._think(part.text)
            elif part.text == self._end:
                self._closed = self._fresh = True
        return Split(reasoning, content)

    def _think(self, text: str) -> str:
        if not self._began:
            text = text.lstrip("\r\n")
        if not text:
            return ""
        self._began = True
        text = self._breaks + text
        shown = text.rstrip("\r\n")
        self._breaks = text[len(shown) :]
        return shown

    def _answer(self, text: str) -> str:
        if not self._closed:
            return text
        text = self._held + text
        shown = ""
        while True:
            if self._fresh:
                text = text.lstrip("\r\n")
            before, found, text = text.partition(self._end)
            held = 0 if found else overlap(before, self._end)
            self._held = before[len(before) - held :]
            before = before[: len(before) - held]
            shown += before
            self._fresh = self._fresh and not before
            if not found:
                return shown


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``marker``, and not all of it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
