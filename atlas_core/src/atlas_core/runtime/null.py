"""A device that computes nothing: real addresses, real copies, recorded launches, failures on demand."""

import ctypes
from collections import deque
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct, field

from atlas_core.contracts.backend import Capabilities, DeviceFacts
from atlas_core.runtime.memory import CheckedMemory
from atlas_core.vocab.errors import DeviceError, KernelError
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs

Command = Callable[[], object]
LOG_LENGTH = 4096


class NullLaunch(Struct, frozen=True):
    """A launch as it was prepared; the null device records it and does nothing else."""

    module: str
    entry: str
    geometry: Geometry
    args: tuple[Arg, ...]
    attrs: LaunchAttrs

    @property
    def description(self) -> str:
        """Kernel, geometry and arguments in one line."""
        shown = ", ".join(
            f"{arg.kind} {arg.value:#x}" if arg.kind in ("ptr", "map") else f"{arg.kind} {arg.value}"
            for arg in self.args
        )
        return f"{self.module}:{self.entry} grid={self.geometry.grid} block={self.geometry.block} ({shown})"


class NullStream(Struct, eq=False):
    """Work in order; ``captured`` collects instead of running while a capture is open."""

    number: int
    queue: deque[Command] = field(default_factory=deque)
    captured: list[Command] | None = None
    launches: list[NullLaunch] = field(default_factory=list)


class NullEvent(Struct, eq=False):
    """``pending`` counts recordings that the stream has not reached yet."""

    timing: bool
    stream: NullStream | None = None
    pending: int = 0


class NullGraph(Struct, eq=False):
    """A captured command list; ``launches`` are its kernels, for ``on_graph`` callbacks and tests."""

    number: int
    commands: tuple[Command, ...]
    launches: tuple[NullLaunch, ...]
    alive: bool = True


class Injection(Struct):
    """What goes wrong, and what is done in place of computing.

    ``fail_at`` makes the n-th submission (enqueue outside a capture, or launch_graph; from 1) raise DeviceError, sticky when
    ``sticky``. ``on_launch`` is called for each launch that runs, in graphs too; ``on_graph`` after a whole graph.
    """

    fail_at: int | None = None
    sticky: bool = False
    on_launch: Callable[[NullLaunch], None] | None = None
    on_graph: Callable[[NullGraph], None] | None = None


class NullBackend:
    """GpuBackend over host memory. Asynchronous: work runs when something waits; each query of an event runs one command.

    ``kernels`` are the (module, entry) pairs that exist; None means that every pair does. ``launches`` holds the last few
    thousand launches that ran; ``submissions`` counts enqueues outside a capture and graph launches.
    """

    def __init__(
        self, *, total_memory: int = 1 << 34, asynchronous: bool = False, bucketed: bool = False,
        kernels: Collection[tuple[str, str]] | None = None, injection: Injection | None = None, arch: str = "null",
    ) -> None:  # fmt: skip
        self.capabilities = Capabilities(asynchronous=asynchronous, bucketed=bucketed, unified_memory=True)
        self.injection = injection or Injection()
        self.launches: deque[NullLaunch] = deque(maxlen=LOG_LENGTH)
        self.submissions = 0
        self._arch = arch
        self._kernels = kernels
        self._memory = CheckedMemory(total_memory)
        self._pinned: dict[int, bytearray] = {}
        self._counter = 0
        self._lost = ""

    def facts(self) -> DeviceFacts:
        """One processor named null."""
        self._alive()
        return DeviceFacts("null device", self._arch, self._memory.total, 1)

    def bind_to_thread(self) -> None:
        """Nothing to bind."""
        self._alive()

    def alloc(self, nbytes: int) -> int:
        """See GpuBackend."""
        self._alive()
        return self._memory.alloc(nbytes)

    def free(self, address: int) -> None:
        """See GpuBackend; freeing twice raises DeviceError."""
        self._memory.free(address)

    def alloc_pinned(self, nbytes: int) -> memoryview:
        """See GpuBackend."""
        self._alive()
        memory = memoryview(bytearray(nbytes))
        self._pinned[id(memory.obj)] = memory.obj  # type: ignore[assignment]
        return memory

    def free_pinned(self, memory: memoryview) -> None:
        """See GpuBackend; raises DeviceError for memory that is not from ``alloc_pinned``."""
        if self._pinned.pop(id(memory.obj), None) is None:
            raise DeviceError("host memory is freed as pinned", "it was not allocated so, or it was freed before")

    def memory(self) -> tuple[int, int]:
        """See GpuBackend."""
        return self._memory.total - self._memory.used, self._memory.total

    def view(self, address: int, nbytes: int) -> memoryview:
        """Device memory as the host sees it (this device has unified memory)."""
        return self._memory.view(address, nbytes)

    def copy_h2d(self, source: memoryview | bytes, target: int) -> None:
        """See GpuBackend."""
        self._alive()
        data = memoryview(source).cast("B")
        if data.nbytes:
            self.view(target, data.nbytes)[:] = data

    def copy_d2h(self, source: int, target: memoryview) -> None:
        """See GpuBackend."""
        self._alive()
        data = target.cast("B")
        if data.nbytes:
            data[:] = self.view(source, data.nbytes)

    def copy_h2d_async(self, source: memoryview, target: int, stream: NullStream) -> None:
        """See GpuBackend."""
        self._memory.require(target, source.nbytes, "a copy to the device")
        self._submit(stream, lambda: self.copy_h2d(source, target))

    def copy_d2h_async(self, source: int, target: memoryview, stream: NullStream) -> None:
        """See GpuBackend."""
        self._memory.require(source, target.nbytes, "a copy from the device")
        self._submit(stream, lambda: self.copy_d2h(source, target))

    def copy_d2d_async(self, source: int, target: int, nbytes: int, stream: NullStream) -> None:
        """See GpuBackend; overlapping ranges raise DeviceError."""
        self._memory.require(source, nbytes, "a copy on the device (source)")
        self._memory.require(target, nbytes, "a copy on the device (target)")
        if abs(source - target) < nbytes:
            raise DeviceError(f"{nbytes} bytes are copied from {source:#x} to {target:#x}", "the ranges overlap")
        self._submit(stream, lambda: ctypes.memmove(target, source, nbytes))

    def memset_async(self, target: int, value: int, nbytes: int, stream: NullStream) -> None:
        """See GpuBackend."""
        self._memory.require(target, nbytes, "a memset")
        self._submit(stream, lambda: ctypes.memset(target, value, nbytes))

    def kernel(self, module: str, entry: str) -> tuple[str, str]:
        """See GpuBackend."""
        if self._kernels is not None and (module, entry) not in self._kernels:
            raise KernelError(
                f"there is no kernel {module}:{entry} for {self._arch}", "it is not among the null device's kernels",
                "name it when the NullBackend is made",
            )  # fmt: skip
        return module, entry

    def prepare_launch(
        self, kernel: tuple[str, str], geometry: Geometry, args: Sequence[Arg], attrs: LaunchAttrs | None = None
    ) -> NullLaunch:
        """See GpuBackend; every pointer must be 0 or lie in allocated memory, of the device or page-locked."""
        module, entry = kernel
        for index, arg in enumerate(args):
            if arg.kind in ("ptr", "map") and arg.value and not self._is_pinned(int(arg.value)):
                self._memory.require(int(arg.value), 1, f"argument {index} of {module}:{entry}")
        return NullLaunch(module, entry, geometry, tuple(args), attrs or LaunchAttrs())

    def enqueue(self, launch: NullLaunch, stream: NullStream) -> None:
        """See GpuBackend."""
        if stream.captured is None:
            self._count(launch.description)
        else:
            stream.launches.append(launch)
        self._submit(stream, lambda: self._run(launch))

    def create_stream(self) -> NullStream:
        """See GpuBackend."""
        self._alive()
        self._counter += 1
        return NullStream(self._counter)

    def synchronize(self, stream: NullStream) -> None:
        """See GpuBackend; raises DeviceError during a capture."""
        self._alive()
        if stream.captured is not None:
            raise DeviceError(f"stream {stream.number} is synchronised", "it is being captured")
        while stream.queue:
            stream.queue.popleft()()

    def create_event(self, *, timing: bool = False) -> NullEvent:
        """See GpuBackend; there is no timing."""
        if timing:
            raise DeviceError("a timing event is asked for", "this device measures no time (event_timing is False)")
        return NullEvent(timing)

    def record_event(self, event: NullEvent, stream: NullStream) -> None:
        """See GpuBackend."""
        event.stream = stream
        event.pending += 1

        def reached() -> None:
            event.pending -= 1

        self._submit(stream, reached)

    def wait_event(self, event: NullEvent) -> None:
        """See GpuBackend."""
        self._alive()
        while event.pending and event.stream is not None:
            if not event.stream.queue:
                raise DeviceError("an event is waited for", "it was recorded in a capture that has not been launched")
            event.stream.queue.popleft()()

    def query_event(self, event: NullEvent) -> bool:
        """See GpuBackend; lets the stream go on by one command, so that polling ends."""
        self._alive()
        if event.pending and event.stream is not None and event.stream.queue:
            event.stream.queue.popleft()()
        return event.pending == 0

    def elapsed_us(self, start: NullEvent, end: NullEvent) -> float:
        """Raises DeviceError: this device measures no time."""
        raise DeviceError(
            "the time between two events is asked for", "this device measures no time (event_timing is False)"
        )

    def begin_capture(self, stream: NullStream) -> None:
        """See GpuBackend."""
        self._alive()
        if stream.captured is not None:
            raise DeviceError(f"a capture of stream {stream.number} is begun", "one is already open")
        stream.captured = []
        stream.launches = []

    def end_capture(self, stream: NullStream) -> NullGraph:
        """See GpuBackend."""
        if stream.captured is None:
            raise DeviceError(f"a capture of stream {stream.number} is ended", "none is open")
        self._counter += 1
        graph = NullGraph(self._counter, tuple(stream.captured), tuple(stream.launches))
        stream.captured = None
        stream.launches = []
        return graph

    def is_capturing(self, stream: NullStream) -> bool:
        """See GpuBackend."""
        return stream.captured is not None

    def launch_graph(self, graph: NullGraph, stream: NullStream) -> None:
        """See GpuBackend; a destroyed graph raises DeviceError."""
        if not graph.alive:
            raise DeviceError(f"graph {graph.number} is launched", "it was destroyed")
        self._count(f"graph {graph.number} of {len(graph.launches)} launches")

        def run() -> None:
            for command in graph.commands:
                command()
            if self.injection.on_graph:
                self.injection.on_graph(graph)

        self._submit(stream, run)

    def destroy_graph(self, graph: NullGraph) -> None:
        """See GpuBackend."""
        graph.alive = False

    def close(self) -> None:
        """See GpuBackend."""
        self._memory.clear()
        self._pinned.clear()

    def _is_pinned(self, address: int) -> bool:
        return any(
            0 <= address - ctypes.addressof(ctypes.c_char.from_buffer(memory)) < len(memory)
            for memory in self._pinned.values()
        )

    def _alive(self) -> None:
        if self._lost:
            raise DeviceError("the device is lost", f"an earlier failure was sticky: {self._lost}", sticky=True)

    def _count(self, what: str) -> None:
        self._alive()
        self.submissions += 1
        if self.submissions == self.injection.fail_at:
            if self.injection.sticky:
                self._lost = what
            raise DeviceError(
                f"{what} failed", f"submission {self.submissions} was told to", sticky=self.injection.sticky
            )

    def _submit(self, stream: NullStream, command: Command) -> None:
        """Capture, queue or run a command."""
        self._alive()
        if stream.captured is not None:
            stream.captured.append(command)
        elif self.capabilities.asynchronous:
            stream.queue.append(command)
        else:
            command()

    def _run(self, launch: NullLaunch) -> None:
        self.launches.append(launch)
        if self.injection.on_launch:
            self.injection.on_launch(launch)
