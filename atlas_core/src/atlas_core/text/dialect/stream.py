"""Text that comes in pieces, read by generators: they ``yield`` when they need more, and are resumed when there is some."""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Waits = Generator[None, None, T]
"""A routine that may have to wait for text."""
Sink = Callable[[str], None]

MAX_HELD = 1 << 16
"""Characters that may be held back while it is open whether they are markup; more than that are text."""
_SPACE = re.compile(r"\s*")
_SHORT = 3
"""So much of a marker at the end of a cut answer is shown, since it may well be text."""


class MalformedError(Exception):
    """What was read is not the markup that it seemed to be; ``ended``: because the text ended."""

    def __init__(self, *, ended: bool = False) -> None:
        super().__init__()
        self.ended = ended


class Stream:
    """``at`` is where reading goes on. All that routines decide depends on the text alone, not on its pieces."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        self._mark: int | None = None

    def feed(self, text: str) -> None:
        """Add a piece; what was read and is not held is forgotten."""
        start = self.at if self._mark is None else self._mark
        self.text = self.text[start:] + text
        self.at -= start
        if self._mark is not None:
            self._mark = 0

    def end(self, *, cut: bool) -> None:
        """There is no more."""
        self.ended, self.cut = True, cut

    def hold(self) -> None:
        """Keep the text from here on, so that ``back`` can return to it."""
        self._mark = self.at

    def release(self) -> None:
        """What was read since ``hold`` is settled."""
        self._mark = None

    def back(self) -> None:
        """Return to where ``hold`` was called, and release."""
        if self._mark is not None:
            self.at = self._mark
        self._mark = None

    def more(self) -> Waits[bool]:
        """Wait for text; False at the end. Raises MalformedError when too much is held."""
        if self._mark is not None and len(self.text) - self._mark > MAX_HELD:
            raise MalformedError
        have = len(self.text) - self.at
        while len(self.text) - self.at == have:
            if self.ended:
                return False
            yield
        return True

    def peek(self, count: int = 1) -> Waits[str]:
        """The next ``count`` characters, fewer only at the end."""
        while len(self.text) - self.at < count:
            if not (yield from self.more()):
                break
        return self.text[self.at : self.at + count]

    def expect(self, text: str) -> Waits[None]:
        """Read ``text``. Raises MalformedError when there is something else."""
        found = yield from self.peek(len(text))
        if found != text:
            raise MalformedError(ended=text.startswith(found) and self.ended and len(found) < len(text))
        self.at += len(text)

    def skip_space(self) -> Waits[None]:
        """Read white space."""
        yield from self.take(_SPACE, _ignore)

    def take(self, run: re.Pattern[str], sink: Sink) -> Waits[None]:
        """Read the longest run; ``run`` matches character by character, also nothing (``[…]*``)."""
        while True:
            found = run.match(self.text, self.at)
            end = found.end() if found else self.at
            if end > self.at:
                sink(self.text[self.at : end])
                self.at = end
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def which(self, options: Sequence[str], offset: int = 0) -> Waits[str | None]:
        """The longest of ``options`` that stands ``offset`` characters from here, not read; None when there is none.

        Raises MalformedError when a cut leaves part of one.
        """
        while True:
            rest = self.text[self.at + offset : self.at + offset + max(map(len, options))]
            if not any(len(rest) < len(option) and option.startswith(rest) for option in options):
                break
            if not (yield from self.more()):
                if self.cut and rest and not any(rest.startswith(option) for option in options):
                    raise MalformedError(ended=True)
                break
        return max((option for option in options if rest.startswith(option)), key=len, default=None)

    def space_then(self, options: Sequence[str], offset: int) -> Waits[bool]:
        """Whether ``offset`` characters from here white space and one of ``options`` follow, or white space and the end."""
        while True:
            found = _SPACE.match(self.text, self.at + offset)
            start = found.end() if found else self.at + offset
            if start < len(self.text):
                return (yield from self.which(options, start - self.at)) is not None
            if not (yield from self.more()):
                return True

    def find(self, markers: tuple[str, ...], sink: Sink) -> Waits[str | None]:
        """Give ``sink`` the text before the first of ``markers`` and stop there; None when the text ends without one."""
        pattern = _any_of(markers)
        while True:
            found = pattern.search(self.text, self.at)
            if found:
                self._give(found.start(), sink)
                return (yield from self.which(markers))
            held = _started(self.text, self.at, markers)
            self._give(len(self.text) - held, sink)
            if not (yield from self.more()):
                if not (self.cut and held >= _SHORT):
                    self._give(len(self.text), sink)
                self.at = len(self.text)
                return None

    def _give(self, end: int, sink: Sink) -> None:
        if end > self.at:
            sink(self.text[self.at : end])
            self.at = end


def _ignore(text: str) -> None:
    """A sink for what nobody wants."""


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _started(text: str, at: int, markers: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that may become a marker."""
    longest = min(max(map(len, markers)) - 1, len(text) - at)
    for length in range(longest, 0, -1):
        tail = text[len(text) - length :]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
