"""Weights from files to the device: threads read into a ring of page-locked pieces while the device copies and packs others."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from msgspec import Struct, field

from atlas_core.contracts.backend import Event, GpuBackend, HostLoader, HostRunner, Launch, Stream
from atlas_core.contracts.ops import Buffer
from atlas_core.loading.ahead import ReadAhead
from atlas_core.loading.drawing import draw
from atlas_core.loading.drawn import Stretch
from atlas_core.loading.extents import ALIGNMENT, MARGIN, ExtentReader
from atlas_core.loading.image import PackedImage
from atlas_core.loading.pieces import Load, Piece, WeightSource, loads, pieces
from atlas_core.loading.resident import ResidentLoads, processors
from atlas_core.runtime.loader import STORED, Progress, WeightCopy, WeightMemory, pack_weight
from atlas_core.vocab.errors import AtlasError

_REPORTS = 100
"""At most so many reports of progress in all."""
_WHOLE = 2
"""Weights that are packed on the host and wait for the device, at most: each is whole in memory."""


class _Shape(Struct, frozen=True):
    """Sizes that suit a device: ``piece`` bytes, so many of them in the ring, and threads that read."""

    piece: int
    slots: int
    threads: int

    @classmethod
    def of(cls, backend: GpuBackend) -> "_Shape":
        """Long pieces where a bus wants them; where the host packs, such as stay in its caches."""
        if isinstance(backend, HostRunner):
            threads = max(1, min(4, processors()))
            return cls(1 << 19, threads, threads)
        if backend.capabilities.asynchronous:
            threads = max(2, min(8, processors()))
            return cls(8 << 20, 2 * threads, threads)
        threads = max(1, min(4, processors() // 2))
        return cls(1 << 20, 2 * threads + 1, threads)


class _Work(Struct, frozen=True):
    """What comes in pieces, by weight the copies that need it whole, and what is made on the device."""

    streamed: list[Piece] = field(default_factory=list)
    whole: dict[str, list[WeightCopy]] = field(default_factory=dict)
    drawn: list[tuple[WeightCopy, Sequence[Stretch]]] = field(default_factory=list)


class _Slot(Struct, frozen=True):
    """One piece of the ring; until ``event`` the device may still read it."""

    view: memoryview
    address: int
    event: Event


class _Filled(Struct, frozen=True):
    slot: _Slot
    load: Load
    begin: int


class _Packed(Struct, frozen=True):
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
    return begin_weights(backend, copies, source, ahead).finish(progress)


def begin_weights(
    backend: GpuBackend, copies: Iterable[WeightCopy], source: WeightSource, ahead: ReadAhead | None = None
) -> "WeightLoading":
    """The same, begun: every copy has its place, and what needs neither the device's thread nor the disk is on its way."""
    listed = tuple(copies)
    repacks = backend.capabilities.unified_memory
    return WeightLoading(
        backend, listed, source, ahead, lambda most: _divided(listed, source, most, repacks=repacks)
    )  # fmt: skip


def load_packed(
    backend: GpuBackend, copies: Iterable[WeightCopy], image: PackedImage, progress: Progress | None = None,
    ahead: ReadAhead | None = None,
) -> WeightMemory:  # fmt: skip
    """The same out of an image, which has every copy as the device holds it.

    Raises CheckpointError when bytes are not those that were written into it.
    """
    return begin_packed(backend, copies, image, ahead).finish(progress)


def begin_packed(
    backend: GpuBackend, copies: Iterable[WeightCopy], image: PackedImage, ahead: ReadAhead | None = None
) -> "WeightLoading":
    """The same, begun."""
    listed = tuple(copies)
    return WeightLoading(backend, listed, None, ahead, partial(_image_pieces, listed, image))


class WeightLoading:
    """Weights on their way to the device. ``memory`` has the place of each; after ``finish`` they are there.

    ``beside``: some come by themselves, so that the caller may do something else before it finishes.
    """

    def __init__(
        self, backend: GpuBackend, listed: Sequence[WeightCopy], source: WeightSource | None, ahead: ReadAhead | None,
        divide: "Callable[[int], _Work]",
    ) -> None:  # fmt: skip
        """On any failure, here or in ``finish``, everything allocated here is freed."""
        self.memory = WeightMemory(backend)
        self._backend, self._listed, self._source, self._ahead = backend, listed, source, ahead
        self._shape = _Shape.of(backend)
        self._resident: ResidentLoads | None = None
        self._finished = False
        try:
            for copy in listed:
                address = backend.alloc(copy.packed.nbytes)
                self.memory.buffers[copy.weight, copy.packed.name] = Buffer(address, copy.packed.nbytes)
            self._work = divide(self._shape.piece)
            self._reads = loads(self._work.streamed, self._shape.piece)
            unread = ahead is None or not ahead.reads
            if unread and self._reads and isinstance(backend, HostLoader) and not self._checked():
                self._resident = ResidentLoads(backend, self._reads, self.memory.address, self._shape.threads)
        except BaseException:
            self.memory.free()
            raise

    @property
    def beside(self) -> bool:
        """See the class."""
        return self._resident is not None and not self._finished

    def finish(self, progress: Progress | None = None) -> WeightMemory:
        """Bring what is missing, if anything is. ``progress(done, total, weight)`` counts packed bytes."""
        if self._finished:
            return self.memory
        try:
            report = _reporter(progress, sum(copy.packed.nbytes for copy in self._listed))
            draw(self._backend, [(self.memory.address(copy), stretches) for copy, stretches in self._work.drawn])
            for copy, _ in self._work.drawn:
                report(copy.packed.nbytes, copy.weight)
            left = self._reads if self._resident is None else self._resident.finish(report)
            upload = _Upload(self._backend, self.memory, self._source, report, self._ahead)
            upload.run(left, self._work.whole, self._shape)
        except BaseException:
            self.stop()
            self.memory.free()
            raise
        self._finished = True
        return self.memory

    def stop(self) -> None:
        """Bring nothing more: nobody will finish this, and ``memory`` may be freed. Safe to call twice."""
        if self._resident is not None:
            self._resident.close()

    def _checked(self) -> bool:
        """Whether what is read is held against checksums, which is not done by launches."""
        return any(piece.checks is not None for load in self._reads for piece in load.pieces)


def _image_pieces(copies: Sequence[WeightCopy], image: PackedImage, most: int) -> "_Work":
    return _Work([piece for copy in copies for piece in image.pieces(copy, most)])


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

    def run(self, reads: Sequence[Load], whole: dict[str, list[WeightCopy]], shape: _Shape) -> None:
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
