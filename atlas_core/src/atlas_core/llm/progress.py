"""One line on a terminal: how far the start is, how many answers are done. Nothing where there is no terminal."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from atlas_core.vocab.messages import Progress

_WIDTH = 24
_INTERVAL = 0.1


class Line:
    """Writes a line over itself, ten times a second at most."""

    def __init__(
        self, shown: bool | None, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``shown`` None: where ``stream`` (None: standard error) is a terminal."""
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty() if shown is None else shown
        self._clock = clock
        self._last = float("-inf")
        self._written = False

    def loading(self, progress: Progress) -> None:
        """The start goes on."""
        share = progress.done / progress.total if progress.total else None
        self._write(f"{progress.phase} {_bar(share)} {progress.note}".rstrip())

    def generating(self, done: int, total: int, tokens: int, seconds: float) -> None:
        """``done`` of ``total`` answers are complete; ``tokens`` were made in ``seconds``."""
        rate = tokens / seconds if seconds > 0 else 0.0
        self._write(f"generating {_bar(done / total)} {done}/{total}, {rate:.1f} tokens/s", last=done == total)

    def clear(self) -> None:
        """Take the line away."""
        if self._written:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._written = False
        self._last = float("-inf")

    def _write(self, text: str, *, last: bool = False) -> None:
        now = self._clock()
        if self._shown and (last or now - self._last >= _INTERVAL):
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._last, self._written = now, True


def _bar(share: float | None) -> str:
    if share is None:
        return "…"
    full = int(share * _WIDTH)
    return f"[{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}"
