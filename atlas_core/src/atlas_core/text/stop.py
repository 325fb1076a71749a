"""Stop strings over a stream of text pieces."""

from collections.abc import Sequence
from typing import NamedTuple

from atlas_core.vocab.errors import RequestError


class StopMatch(NamedTuple):
    """``text`` may be shown now; ``hit`` is the stop string that ended the stream, if one did."""

    text: str
    hit: str | None = None


class StopMatcher:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    The string whose last character comes first wins; of several that end together, the longest. Text that may yet become
    a stop string is held back, and nothing after it is shown. One Knuth-Morris-Pratt automaton for each string: the work
    is proportional to the text, and none of it is looked at twice.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include`` shows the stop string itself. Raises RequestError for an empty stop string."""
        if any(not stop for stop in stops):
            raise RequestError(
                "a stop string is empty", "every text contains the empty string", "leave it out", field="stop"
            )
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failures = tuple(_failure(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self._ended = False

    def push(self, piece: str) -> StopMatch:
        """Take the next piece. Raises ValueError when the stream has already ended."""
        if self._ended:
            raise ValueError("text after the end of the stream")
        if not self._stops:
            return StopMatch(piece)
        for index, char in enumerate(piece):
            hit = self._step(char)
            if hit is not None:
                self._ended = True
                text = self._held + piece[: index + 1]
                return StopMatch(text if self._include else text[: len(text) - len(hit)], hit)
        text = self._held + piece
        shown = len(text) - max(self._matched, default=0)
        self._held = text[shown:]
        return StopMatch(text[:shown])

    def finish(self) -> str:
        """What was held back for a stop string that did not come; the stream has ended."""
        self._ended = True
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        hit = None
        for which, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            matched = self._matched[which]
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                hit = hit or stop
                matched = failure[matched - 1]
            self._matched[which] = matched
        return hit


def _failure(pattern: str) -> tuple[int, ...]:
    """For each prefix of ``pattern``, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return tuple(table)
