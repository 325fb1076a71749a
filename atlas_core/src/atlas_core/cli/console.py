"""The start of a server, told to a person on a terminal or to a log."""

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from atlas_core.vocab.messages import LedgerEntry, Progress, Ready

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 10
"""Percent between two lines of one phase, where lines cannot be rewritten."""


class Console:
    """A server's Reporter: one line that is rewritten on a terminal; elsewhere a line for each phase and every tenth of it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """``stream`` None: standard error."""
        self._stream = sys.stderr if stream is None else stream
        self._rewrites = self._stream.isatty()
        self._phase = ""
        self._percent = 0

    def progress(self, progress: Progress) -> None:
        """A phase went on."""
        percent = 100 * progress.done // progress.total if progress.total else 0
        if self._rewrites:
            self._stream.write(f"\r\x1b[K{_line(progress, percent)}")
            self._stream.flush()
        elif progress.phase != self._phase or percent >= self._percent + _STEP:
            self._print(_line(progress, percent))
            self._percent = percent - percent % _STEP
        self._phase = progress.phase

    def ready(self, url: str, info: Ready) -> None:
        """Requests are served: where the time and the memory went, and where to reach the server."""
        if self._rewrites:
            self._stream.write("\r\x1b[K")
        if info.ledger:
            total = sum(entry.seconds for entry in info.ledger)
            rows = [(e.phase, f"{e.seconds:.2f} s", *_volume(e)) for e in info.ledger]
            self._table("start", [*rows, ("total", f"{total:.2f} s", "", "")])
        if info.budget:
            total_bytes = sum(count for _, count in info.budget)
            self._table("memory", [*((term, size(count)) for term, count in info.budget), ("total", size(total_bytes))])
        limits = f"context {info.max_seq_len} tokens, {info.max_batch_size} sequences at once"
        self._print(f"ready: {url}/v1  ({limits})")

    def notice(self, text: str) -> None:
        """Anything else that a person should know."""
        self._print(text)

    def _table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        self._print(title)
        for line in aligned(rows):
            self._print(f"  {line}")

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([first.strip().ljust(widths[0]), *others]).rstrip()


def _volume(entry: LedgerEntry) -> tuple[str, str]:
    """Bytes and bytes a second, for phases that move any."""
    if not entry.bytes or not entry.seconds:
        return "", ""
    return size(entry.bytes), f"{size(round(entry.bytes / entry.seconds))}/s"


def size(count: int) -> str:
    """Bytes in the largest unit that gives at least 1."""
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _line(progress: Progress, percent: int) -> str:
    parts = [progress.phase, f"{percent} %" if progress.total else "", progress.note]
    return "  ".join(part for part in parts if part)
