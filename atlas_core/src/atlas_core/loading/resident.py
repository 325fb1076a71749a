"""Weights that lie in the page cache, to a device whose launches are calls: read and packed on threads without Python.

Nothing waits for a disk here: what is not in the page cache, and what needs more than launches, is left to ``loading.upload``.
"""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from atlas_core.contracts.backend import GpuBackend, HostLoad, HostLoader, HostRooms, Launch, LoadState
from atlas_core.loading.extents import ExtentReader
from atlas_core.loading.pieces import Load, Piece
from atlas_core.runtime.loader import WeightCopy

_BLOCK = 4096
_LOOK, _SOME = 0.05, 64
"""Seconds between two reports of progress, or loads where this thread takes part."""


class _HostBackend(GpuBackend, HostLoader, Protocol):
    """What this needs of a backend."""


class ResidentLoads:
    """Loads begun on threads of their own; ``finish`` gives those that have to be brought in another way."""

    def __init__(
        self, backend: _HostBackend, reads: Sequence[Load], address: Callable[[WeightCopy], int], threads: int
    ) -> None:
        """``address`` tells where a copy lies; ``threads`` are those begun here and the one that finishes, which has a room too.

        What is allocated here, ``finish`` and ``close`` give back.
        """
        self._reads = reads
        self._files = ExtentReader()
        self._own = max(1, threads - 1)
        longest = max((load.extent.nbytes for load in reads), default=0)
        each = -(-longest // _BLOCK) * _BLOCK
        self._backend, self._address = backend, address
        self._block: memoryview | None = backend.alloc_pinned(max(1, (self._own + 1) * each))
        self._threads: list[threading.Thread] = []
        try:
            base = int(np.frombuffer(self._block, np.uint8).ctypes.data)
            self._loads = backend.prepare_loads([self._load(load, base) for load in reads], HostRooms(base, each))
        except BaseException:
            self.close()
            raise
        for room in range(self._own):
            bring = partial(self._loads.run, room, len(reads))
            self._threads.append(threading.Thread(target=bring, name="atlas-load", daemon=True))
            self._threads[-1].start()

    def finish(self, report: Callable[[int, str], None]) -> list[Load]:
        """Take part until all are brought, and ``report(packed bytes, weight)`` each piece; what was left."""
        seen = bytes(len(self._reads))
        more = True
        while True:
            more = more and self._loads.run(self._own, _SOME)
            alive = [thread for thread in self._threads if thread.is_alive()]
            states = self._loads.states()
            for load, was, now in zip(self._reads, seen, states, strict=True):
                if now == LoadState.DONE and was != now:
                    for piece in load.pieces:
                        report(piece.nbytes, piece.copy.weight)
            seen = states
            if not (alive or more):
                break
            if not more:
                alive[0].join(_LOOK)
        self.close()
        return [load for load, state in zip(self._reads, seen, strict=True) if state != LoadState.DONE]

    def close(self) -> None:
        """End, whatever is there. Safe to call twice."""
        if self._threads:
            self._loads.stop()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._files.close()
        if self._block is not None:
            self._backend.free_pinned(self._block)
            self._block = None

    def _load(self, load: Load, room: int) -> HostLoad:
        launches = tuple(self._launch(piece, room + piece.extent.start - load.extent.start) for piece in load.pieces)
        descriptor = self._files.descriptor(load.extent.path)
        return HostLoad(descriptor, load.extent.start, load.extent.nbytes, room, launches)

    def _launch(self, piece: Piece, source: int) -> Launch:
        target = self._address(piece.copy) + piece.offset
        if piece.repack is None:
            return self._backend.prepare_copy(source, target, piece.nbytes)
        # The device reads host memory, and the piece lives as long as this.
        order = 0 if piece.order is None else int(piece.order.ctypes.data)
        return piece.repack.launch(self._backend, source, order, target, piece.rows)


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
