"""Blocks of a checkpoint's files, read from the disk before anybody asks for them: from before there is a device, to the end."""

import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from atlas_core.contracts.checkpoint import Extent
from atlas_core.loading.extents import MARGIN, ExtentReader
from atlas_core.runtime.host import memory
from atlas_core.vocab.errors import AtlasError

BLOCK = 8 << 20
"""Bytes of one read: disks want long ones, and some, however small the pieces are that a device takes."""
_THREADS = 8
_ROOM, _SHARE = 512, 32
"""Blocks held at most, and the part of the available memory, which a device may share."""
_BEHIND = 16
"""Blocks before the one asked for last that may still be asked for: readers take turns in the order of the files."""
_LEAST = 2 * _BEHIND
"""Fewer blocks might all be such as nobody asks for any more, and then nothing would be read again."""
_GAP = 64 * 1024
"""Bytes between two extents that are rather read for nothing than left out."""
_PROBES = 16
"""Places of a file of which all are in the page cache when all of it is taken to be."""


class _Block(Struct):
    """``data`` are the bytes of ``extent`` once ``done``, until all were ``taken``; None too when nobody reads them here."""

    index: int
    extent: Extent
    done: bool = False
    taken: int = 0
    data: memoryview | None = None


class ReadAhead:
    """Keeps the disk busy in the order of the files, within a bounded room of ordinary memory.

    Imports, planning a step and waking a device take two seconds in which a disk would have nothing to do, and later the pieces
    that suit a device need not suit the disk. What is in the page cache is left there. A block that cannot be read is left to who
    asks for it, and says why. Imported before numpy is.
    """

    def __init__(self, extents: Iterable[Extent], room: int | None = None) -> None:
        """``room``: blocks that are held at most; None: what this machine can spare."""
        if room is None:
            room = min(_ROOM, memory()[0] // _SHARE // BLOCK)
        self._files = ExtentReader()
        asked = _runs(extents)
        self._asked = {run.path for run in asked}
        runs = [run for run in asked if not self._cached(run)] if room >= _LEAST else []
        self._blocks = [
            _Block(index, extent) for index, extent in enumerate(part for run in runs for part in _cut(run))
        ]
        self._of_file: dict[Path, list[_Block]] = {}
        for block in self._blocks:
            self._of_file.setdefault(block.extent.path, []).append(block)
        self._room, self._held = room, 0
        self._next = 0  # block to be read
        self._kept = 0  # block before which none is kept
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, name="atlas-ahead", daemon=True)
            for _ in range(min(_THREADS, len(self._blocks)))
        ]
        for thread in self._threads:
            thread.start()

    def take(self, extent: Extent, into: memoryview) -> bool:
        """Whether all of ``extent`` was read here, and now is at the beginning of ``into``.

        Waits for the disk. Bytes are given up once taken: each is asked for once, in the order of the files, nearly.
        """
        import numpy as np  # others have imported it by now

        blocks = self._of_file.get(extent.path, [])
        place = bisect_right(blocks, extent.start, key=lambda block: block.extent.start) - 1
        position, end, target = extent.start, extent.start + extent.nbytes, np.frombuffer(into, np.uint8)
        while position < end:
            if not 0 <= place < len(blocks):
                return False
            block, place = blocks[place], place + 1
            start, data = block.extent.start, self._awaited(block)
            if data is None or not start <= position < start + len(data):
                return False
            part = data[position - start : end - start]
            # Not a slice of a memoryview, which would keep all other threads from running meanwhile.
            np.copyto(target[position - extent.start :][: len(part)], np.frombuffer(part, np.uint8))
            position += len(part)
            # All of it, not its end: neighbours that share a block come here in any order.
            with self._changed:
                block.taken += len(part)
                if block.taken >= len(data):
                    self._drop(block)
        return True

    def covers(self, path: Path) -> bool:
        """Whether a file was asked for here, though it may have nothing to be read."""
        return path in self._asked

    def restrict(self, extents: Iterable[Extent]) -> None:
        """Leave out blocks in which nothing of ``extents`` lies, as far as they are not read yet."""
        wanted: dict[Path, list[Extent]] = {}
        for run in _runs(extents):
            wanted.setdefault(run.path, []).append(run)
        with self._changed:
            for block in self._blocks[self._next :]:
                runs, end = wanted.get(block.extent.path, []), block.extent.start + block.extent.nbytes
                before = bisect_right(runs, end - 1, key=lambda run: run.start)
                if not before or runs[before - 1].start + runs[before - 1].nbytes <= block.extent.start:
                    block.done = True

    @property
    def reads(self) -> bool:
        """Whether there was anything to be read from the disk."""
        return bool(self._blocks)

    @property
    def held(self) -> int:
        """Blocks that are in memory."""
        return sum(block.data is not None for block in self._blocks)

    def close(self) -> None:
        """End, and forget what nobody took. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for block in self._blocks:
            block.data = None
        self._files.close()

    def _cached(self, run: Extent) -> bool:
        """Whether all of a run is in the page cache, most likely: then nobody need ask for every block."""
        step = max(1, run.nbytes // _PROBES)
        with suppress(AtlasError):
            return all(
                self._files.resident(Extent(run.path, place, 1))
                for place in range(run.start, run.start + run.nbytes, step)
            )
        return False

    def _awaited(self, block: _Block) -> memoryview | None:
        with self._changed:
            for passed in self._blocks[self._kept : max(0, block.index - _BEHIND)]:
                self._drop(passed)
                self._kept = passed.index + 1
            self._next = max(self._next, self._kept)
            # Not read by whoever waits: what he wants begins in the block before, which would be read twice.
            self._changed.wait_for(lambda: block.done or self._closed or block.index < self._kept)
            return block.data

    def _drop(self, block: _Block) -> None:
        if block.data is not None:
            block.data = None
            self._held -= 1
            self._changed.notify_all()

    def _read(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held < self._room or self._closed)
                while self._next < len(self._blocks) and self._blocks[self._next].done:
                    self._next += 1
                if self._closed or self._next == len(self._blocks):
                    return
                block = self._blocks[self._next]
                self._next += 1
                self._held += 1
            data = self._bytes(block.extent)
            with self._changed:
                block.done = True
                if data is not None and block.index >= self._kept:
                    block.data = data
                else:
                    self._held -= 1
                self._changed.notify_all()

    def _bytes(self, extent: Extent) -> memoryview | None:
        try:
            if self._files.resident(extent):
                return None
            room = memoryview(mmap.mmap(-1, extent.nbytes + MARGIN))  # memory alone, and it begins at a whole block
            begin = self._files.read(extent, room)
        except AtlasError:
            return None
        return room[begin : begin + extent.nbytes]


def _runs(extents: Iterable[Extent]) -> list[Extent]:
    """Neighbours as one, in the order in which ``pieces.loads`` reads files."""
    found: list[Extent] = []
    for extent in sorted(extents, key=lambda each: (str(each.path), each.start)):
        last = found[-1] if found else None
        if last and last.path == extent.path and extent.start - (last.start + last.nbytes) <= _GAP:
            end = max(last.start + last.nbytes, extent.start + extent.nbytes)
            found[-1] = Extent(last.path, last.start, end - last.start)
        else:
            found.append(extent)
    return found


def _cut(run: Extent) -> Sequence[Extent]:
    """Blocks that begin at multiples of BLOCK, but for the first."""
    end = run.start + run.nbytes
    starts = [run.start, *range((run.start // BLOCK + 1) * BLOCK, end, BLOCK)]
    return [Extent(run.path, a, b - a) for a, b in zip(starts, [*starts[1:], end], strict=True) if b > a]
