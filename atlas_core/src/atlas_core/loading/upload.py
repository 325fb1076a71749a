"""Weights from files to the device: threads read into a ring of page-locked pieces while the device copies and packs others."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from atlas_core.contracts.backend import Event, GpuBackend, HostRunner, Launch, Stream
from atlas_core.contracts.ops import Buffer
from atlas_core.loading.ahead import ReadAhead
from atlas_core.loading.drawing import draw
from atlas_core.loading.drawn import Stretch
from atlas_core.loading.extents import ALIGNMENT, MARGIN, ExtentReader
from atlas_core.loading.image import PackedImage
from atlas_core.loading.pieces import Load, Piece, WeightSource, loads, pieces
from atlas_core.runtime.loader import STORED, Progress, WeightCopy, WeightMemory, pack_weight
from atlas_core.vocab.errors import AtlasError

_REPORTS = 100
"""At most so many reports of progress in all."""
_WHOLE = 2
"""Weights that are packed on the host and wait for the device, at most: each is whole in memory."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes that suit a device: ``piece`` bytes, so many of them in the ring, and threads that read."""

    piece: int
    slots: int
    threads: int

    @classmethod
    def of(cls, backend: GpuBackend) -> "_Shape":
        """Long pieces where a bus wants them; where the host packs, such as stay in its caches."""
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if isinstance(backend, HostRunner):
            threads = max(1, min(4, processors))
            return cls(1 << 20, threads, threads)
        if backend.capabilities.asynchronous:
            threads = max(2, min(8, processors))
            return cls(8 << 20, 2 * threads, threads)
        threads = max(1, min(4, processors // 2))
        return cls(1 << 20, 2 * threads + 1, threads)


@dataclass(frozen=True, slots=True)
class _Work:
    """What comes in pieces, by weight the copies that need it whole, and what is made on the device."""

    streamed: list[Piece] = field(default_factory=list)
    whole: dict[str, list[WeightCopy]] = field(default_factory=dict)
    drawn: list[tuple[WeightCopy, Sequence[Stretch]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Slot:
    """One piece of the ring; until ``event`` the device may still read it."""

    view: memoryview
    address: int
    event: Event


@dataclass(frozen=True, slots=True)
class _Filled:
    slot: _Slot
    load: Load
    begin: int


@dataclass(frozen=True, slots=True)
class _Packed:
    copy: WeightCopy
    data: bytes | memoryview


def load_weights(
    backend: GpuBackend, copies: Iterable[WeightCopy], source: WeightSource, progress: Progress | None = None,
    ahead: ReadAhead | None = None,
) -> WeightMemory:  # fmt: skip
    """Every copy on the device, filled. ``progress(done, total, weight)`` counts packed bytes. ``ahead`` has what was read already.

    Weights that lie in files as they are go there in pieces; those that are made up are made there. Others are read whole and
    packed by their implementation, one ahead of the device. On any failure everything allocated here is freed.
    """
    listed = tuple(copies)
    repacks = backend.capabilities.unified_memory
    return _loaded(
        backend, listed, source, progress, ahead, lambda most: _divided(listed, source, most, repacks=repacks)
    )


def load_packed(
    backend: GpuBackend, copies: Iterable[WeightCopy], image: PackedImage, progress: Progress | None = None,
    ahead: ReadAhead | None = None,
) -> WeightMemory:  # fmt: skip
    """The same out of an image, which has every copy as the device holds it.

    Raises CheckpointError when bytes are not those that were written into it.
    """
    listed = tuple(copies)
    return _loaded(
        backend, listed, None, progress, ahead,
        lambda most: _Work([piece for copy in listed for piece in image.pieces(copy, most)]),
    )  # fmt: skip


def _loaded(
    backend: GpuBackend, listed: Sequence[WeightCopy], source: WeightSource | None, progress: Progress | None,
    ahead: ReadAhead | None, divide: Callable[[int], _Work],
) -> WeightMemory:  # fmt: skip
    memory = WeightMemory(backend)
    shape = _Shape.of(backend)
    try:
        for copy in listed:
            address = backend.alloc(copy.packed.nbytes)
            memory.buffers[copy.weight, copy.packed.name] = Buffer(address, copy.packed.nbytes)
        work = divide(shape.piece)
        report = _reporter(progress, sum(copy.packed.nbytes for copy in listed))
        draw(backend, [(memory.address(copy), stretches) for copy, stretches in work.drawn])
        for copy, _ in work.drawn:
            report(copy.packed.nbytes, copy.weight)
        _Upload(backend, memory, source, report, ahead).run(work.streamed, work.whole, shape)
    except BaseException:
        memory.free()
        raise
    return memory


def _divided(copies: Sequence[WeightCopy], source: WeightSource, most: int, *, repacks: bool) -> _Work:
    work = _Work()
    for copy in copies:
        drawn = source.drawn(copy.weight) if copy.packed.name.startswith(STORED) else None
        placed = source.placed(copy.weight) if drawn is None else None
        cut = None if placed is None else pieces(copy, placed, most, repacks=repacks)
        if drawn is not None:
            work.drawn.append((copy, drawn))
        elif cut is not None:
            work.streamed.extend(cut)
        else:
            work.whole.setdefault(copy.weight, []).append(copy)
    return work


def _reporter(progress: Progress | None, total: int) -> Callable[[int, str], None]:
    done = told = 0

    def report(nbytes: int, weight: str) -> None:
        nonlocal done, told
        done += nbytes
        if progress and (done == total or done - told >= total // _REPORTS):
            told = done
            progress(done, total, weight)

    return report


class _Upload:
    """One load. The calling thread alone speaks to the device; the others read, and pack what is packed on the host.

    Where launches are calls of functions each reader packs what it has read, while it is in its processor's cache.
    """

    def __init__(
        self, backend: GpuBackend, memory: WeightMemory, source: WeightSource | None, report: Callable[[int, str], None],
        ahead: ReadAhead | None = None,
    ) -> None:  # fmt: skip
        self._backend, self._memory, self._source, self._report = backend, memory, source, report
        self._ahead = ahead
        self._stream: Stream = backend.create_stream()
        self._free: SimpleQueue[_Slot | None] = SimpleQueue()
        self._ready: SimpleQueue[_Filled | _Packed | Load | BaseException] = SimpleQueue()
        self._in_flight: deque[_Slot] = deque()
        self._room = threading.Semaphore(_WHOLE)
        self._stopped = False
        self._runner = backend if isinstance(backend, HostRunner) else None

    def run(self, streamed: Sequence[Piece], whole: dict[str, list[WeightCopy]], shape: _Shape) -> None:
        reads = loads(streamed, shape.piece)
        threads = min(shape.threads, len(reads))
        if self._ahead is not None and not reads:
            self._ahead.close()
        longest = max((load.extent.nbytes + load.order_bytes for load in reads), default=0)
        with _ring(self._backend, longest, min(shape.slots, len(reads))) as slots, contextlib.ExitStack() as ending:
            ending.callback(self._drain)
            files = ExtentReader()
            ending.callback(files.close)
            for slot in slots:
                self._free.put(slot)
            turns, lock = iter(reads), threading.Lock()
            workers = [
                threading.Thread(target=self._guard, args=(self._read, files, turns, lock), daemon=True)
                for _ in range(threads)
            ]
            if whole:
                workers.append(threading.Thread(target=self._guard, args=(self._pack, whole), daemon=True))
            ending.callback(self._stop, workers)
            for worker in workers:
                worker.start()
            for _ in range(len(reads) + sum(map(len, whole.values()))):
                self._take(self._next())
            self._backend.synchronize(self._stream)

    # On threads of their own

    def _guard(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 raised again by the thread that waits
            self._ready.put(error)

    def _read(self, files: ExtentReader, turns: Iterator[Load], lock: threading.Lock) -> None:
        while (slot := self._free.get()) is not None:
            with lock:
                load = next(turns, None)
            if load is None or self._stopped:
                return
            taken = self._ahead is not None and self._ahead.take(load.extent, slot.view)
            begin = 0 if taken else files.read(load.extent, slot.view)
            for piece in load.pieces:
                if piece.checks is not None:
                    at = begin + piece.extent.start - load.extent.start
                    piece.checks.verify(slot.view[at : at + piece.extent.nbytes], piece.extent)
            filled = _Filled(slot, load, begin)
            if self._runner is None:
                self._ready.put(filled)
            else:
                self._bring(filled)
                self._free.put(slot)
                self._ready.put(load)

    def _pack(self, whole: dict[str, list[WeightCopy]]) -> None:
        assert self._source is not None
        for weight, group in whole.items():
            data = self._source.read(weight)
            for copy in group:
                self._room.acquire()
                if self._stopped:
                    return
                self._ready.put(_Packed(copy, pack_weight(copy.implementation, copy.packed, copy.spec, weight, data)))

    # On the calling thread

    def _next(self) -> _Filled | _Packed | Load:
        """What is ready first; while nothing is, pieces that the device is done with go back to the readers."""
        while True:
            while self._in_flight and self._backend.query_event(self._in_flight[0].event):
                self._recycle()
            try:
                item = self._ready.get(block=not self._in_flight)
            except Empty:
                self._backend.wait_event(self._in_flight[0].event)
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def _take(self, item: _Filled | _Packed | Load) -> None:
        if isinstance(item, _Packed):
            self._backend.copy_h2d(item.data, self._memory.address(item.copy))
            self._room.release()
            self._report(item.copy.packed.nbytes, item.copy.weight)
            return
        if isinstance(item, _Filled):
            self._bring(item)
            self._backend.record_event(item.slot.event, self._stream)
            self._in_flight.append(item.slot)
        for piece in item.pieces if isinstance(item, Load) else item.load.pieces:
            self._report(piece.nbytes, piece.copy.weight)

    # On the calling thread, or on any where launches are calls

    def _bring(self, filled: _Filled) -> None:
        """Copy or pack every piece of a load."""
        slot, behind = filled.slot, len(filled.slot.view)
        for piece in filled.load.pieces:
            order = 0
            if piece.order is not None:
                # Behind the rows, where the device can read it too.
                behind -= piece.order.nbytes
                slot.view[behind : behind + piece.order.nbytes] = piece.order.view(np.uint8).data
                order = slot.address + behind
            begin = filled.begin + piece.extent.start - filled.load.extent.start
            target = self._memory.address(piece.copy) + piece.offset
            if piece.repack is None:
                self._copy(slot.view[begin : begin + piece.nbytes], target)
            else:
                self._run(piece.repack.launch(self._backend, slot.address + begin, order, target, piece.rows))

    def _copy(self, source: memoryview, target: int) -> None:
        if self._runner is None:
            self._backend.copy_h2d_async(source, target, self._stream)
        else:
            self._backend.copy_h2d(source, target)

    def _run(self, launch: Launch) -> None:
        if self._runner is None:
            self._backend.enqueue(launch, self._stream)
        else:
            self._runner.run_here(launch)

    def _recycle(self) -> None:
        self._free.put(self._in_flight.popleft())

    def _stop(self, workers: Sequence[threading.Thread]) -> None:
        """Let every thread end; what they still bring is not looked at."""
        self._stopped = True
        for _ in workers:
            self._free.put(None)
            self._room.release()
        for worker in workers:
            worker.join()

    def _drain(self) -> None:
        """The device must be done with the ring before it goes. After a fault this fails too: the first error counts."""
        with contextlib.suppress(AtlasError):
            self._backend.synchronize(self._stream)


@contextmanager
def _ring(backend: GpuBackend, longest: int, count: int) -> Iterator[list[_Slot]]:
    """``count`` aligned pieces of one page-locked block, each with room for ``longest`` bytes."""
    if not count:
        yield []
        return
    each = -(-longest // ALIGNMENT) * ALIGNMENT + MARGIN
    block = backend.alloc_pinned(count * each + ALIGNMENT)
    try:
        base = int(np.frombuffer(block, np.uint8).ctypes.data)
        skip = -base % ALIGNMENT
        yield [
            _Slot(block[skip + i * each : skip + (i + 1) * each], base + skip + i * each, backend.create_event())
            for i in range(count)
        ]
    finally:
        backend.free_pinned(block)
