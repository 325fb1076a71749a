"""GpuBackend for the CPU: device memory is host memory, calls return when work is done, a graph is a command list."""

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import Struct

from atlas_core.contracts.backend import Capabilities, DeviceFacts, HostLoad, HostRooms, Launch
from atlas_core.kernels.library import KernelLibrary
from atlas_core.runtime import host
from atlas_core.vocab.errors import DeviceError, UsageError
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, i32, i64, ptr
from atlas_plugin_cpu import machine
from atlas_plugin_cpu.executor import Command, CommandList, Kernel, Modules, Pool, pack
from atlas_plugin_cpu.loads import Loads
from atlas_plugin_cpu.memory import Memory

_BUG = "report this as a bug"


class CpuStream(Struct, eq=False):
    """Ordered work. Outside a capture everything is done at once, in the order of the calls, so nothing is kept."""

    recorded: list[Command] | None = None


class CpuEvent(Struct, eq=False):
    """A moment in a stream; ``at`` is in nanoseconds of a monotonic clock, 0 before the first record."""

    timing: bool
    at: int = 0


class CpuGraph(Struct, eq=False):
    """A command list, until it is destroyed."""

    commands: CommandList | None


class CpuBackend:
    """One host. Every call is synchronous; errors surface where they are made."""

    capabilities = Capabilities(asynchronous=False, bucketed=False, unified_memory=True, event_timing=True)

    def __init__(self, library: KernelLibrary, threads: int) -> None:
        self._library = library
        self._modules = Modules(library)
        # Looked up here, so that nothing is once steps run.
        self._copies, self._sets = (self._modules.kernel("executor", f"memory_{what}") for what in ("copy", "set"))
        self._pool: Pool | None = Pool(self._modules, threads)
        self._memory = Memory(self._populate)
        self._pinned: set[int] = set()
        self._graphs: set[CpuGraph] = set()

    @property
    def _threads(self) -> Pool:
        if self._pool is None:
            raise DeviceError("the CPU backend was used after it was closed", "its threads and memory are gone", _BUG)
        return self._pool

    def facts(self) -> DeviceFacts:
        """``processors`` is the number of threads that run kernels."""
        return DeviceFacts(machine.processor_name(), self._library.target.arch, host.memory()[1], self._threads.threads)

    def bind_to_thread(self) -> None:
        """Nothing to do: memory and threads belong to the process."""

    def alloc(self, nbytes: int) -> int:
        """Page-aligned memory, backed by huge pages from 2 MiB on where the kernel has them."""
        return self._memory.alloc(nbytes)

    def free(self, address: int) -> None:
        """Give memory back."""
        self._memory.free(address)

    def expect(self, nbytes: int) -> None:
        """See contracts.backend.Forewarned."""
        self._memory.expect(nbytes)

    def _populate(self, address: int, nbytes: int, state: int) -> Callable[[], None]:
        kernel = self._modules.kernel("executor", "memory_populate")
        command = pack(kernel, Geometry((1, 1, 1)), (ptr(address), i64(nbytes), ptr(state)))
        return partial(self._threads.run_here, command)

    def alloc_pinned(self, nbytes: int) -> memoryview:
        """Ordinary memory: the CPU reaches all of it at full speed."""
        if nbytes < 1:
            raise DeviceError(f"{nbytes} bytes of pinned memory were asked for", "nothing can be copied there", _BUG)
        address = self._memory.alloc(nbytes)
        self._pinned.add(address)
        return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")

    def free_pinned(self, memory: memoryview) -> None:
        """Give it back. Raises DeviceError for memory that ``alloc_pinned`` did not give."""
        address = _address(memory)
        if address not in self._pinned:
            raise DeviceError("memory was freed as pinned", "alloc_pinned did not give it", _BUG)
        self._pinned.remove(address)
        self._memory.free(address)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes that this process may have; what waits for being allocated is free."""
        ready = self._memory.ready
        free, total = host.memory()
        return free + ready, total

    def copy_h2d(self, source: memoryview | bytes, target: int) -> None:
        """Copy now."""
        nbytes = memoryview(source).nbytes
        self._memory.check(target, nbytes, "a copy")
        ctypes.memmove(target, _address(source), nbytes)

    def copy_d2h(self, source: int, target: memoryview) -> None:
        """Copy now."""
        self._memory.check(source, target.nbytes, "a copy")
        ctypes.memmove(_address(target), source, target.nbytes)

    def copy_h2d_async(self, source: memoryview, target: int, stream: CpuStream) -> None:
        """In stream order; inside a capture the copy becomes a command that reads ``source`` anew at each replay."""
        self._memory.check(target, source.nbytes, "a copy")
        self._copy(_address(source), target, source.nbytes, stream)

    def copy_d2h_async(self, source: int, target: memoryview, stream: CpuStream) -> None:
        """In stream order."""
        self._memory.check(source, target.nbytes, "a copy")
        self._copy(source, _address(target), target.nbytes, stream)

    def copy_d2d_async(self, source: int, target: int, nbytes: int, stream: CpuStream) -> None:
        """In stream order. Raises DeviceError when the ranges overlap."""
        self._memory.check(source, nbytes, "a copy")
        self._memory.check(target, nbytes, "a copy")
        if source < target + nbytes and target < source + nbytes and nbytes:
            raise DeviceError(f"a copy of {nbytes} bytes from {source:#x} to {target:#x}", "the ranges overlap", _BUG)
        self._copy(source, target, nbytes, stream)

    def _copy(self, source: int, target: int, nbytes: int, stream: CpuStream) -> None:
        self.enqueue(self.prepare_copy(source, target, nbytes), stream)

    def memset_async(self, target: int, value: int, nbytes: int, stream: CpuStream) -> None:
        """In stream order."""
        self._memory.check(target, nbytes, "a memset")
        args = (ptr(target), i32(value), i64(nbytes))
        self.enqueue(self.prepare_launch(self._sets, Geometry(), args), stream)

    def kernel(self, module: str, entry: str) -> Kernel:
        """Find and load a compiled entry."""
        return self._modules.kernel(module, entry)

    def prepare_launch(
        self, kernel: Kernel, geometry: Geometry, args: Sequence[Arg], attrs: LaunchAttrs | None = None
    ) -> Command:
        """Pack the arguments. ``grid[0]`` is the number of tasks, 0 for one a thread; ``attrs`` speak of GPUs only."""
        if attrs is not None and attrs != LaunchAttrs():
            raise DeviceError(
                f"{kernel} cannot be launched with {attrs}", "a CPU has neither clusters nor overlapping launches", _BUG
            )
        return pack(kernel, geometry, args)

    def enqueue(self, launch: Launch, stream: CpuStream) -> None:
        """Run now; inside a capture, record."""
        command = _own(launch)
        if stream.recorded is not None:
            stream.recorded.append(command)
            return
        self._threads.run_once(command)

    def run_here(self, launch: Launch) -> None:
        """See contracts.backend.HostRunner."""
        self._threads.run_here(_own(launch))

    def prepare_copy(self, source: int, target: int, nbytes: int) -> Command:
        """See contracts.backend.HostLoader."""
        return self.prepare_launch(self._copies, Geometry(), (ptr(target), ptr(source), i64(nbytes)))

    def prepare_loads(self, loads: Sequence[HostLoad], rooms: HostRooms) -> Loads:
        """See contracts.backend.HostLoader."""
        commands = [[_own(launch) for launch in load.launches] for load in loads]
        return Loads(self._modules.kernel("executor", "loads_run"), loads, commands, rooms)

    def create_stream(self) -> CpuStream:
        """A stream."""
        return CpuStream()

    def synchronize(self, stream: CpuStream) -> None:
        """Everything is done already. Raises DeviceError inside a capture."""
        if stream.recorded is not None:
            raise DeviceError("a stream was synchronised", "it is being captured", _BUG)

    def create_event(self, *, timing: bool = False) -> CpuEvent:
        """An event; any event may be timed here."""
        return CpuEvent(timing)

    def record_event(self, event: CpuEvent, stream: CpuStream) -> None:
        """Note the time. Raises DeviceError inside a capture, where there is no such moment."""
        if stream.recorded is not None:
            raise DeviceError("an event was recorded", "its stream is being captured", _BUG)
        event.at = time.perf_counter_ns()

    def wait_event(self, event: CpuEvent) -> None:
        """Recorded work is done."""

    def query_event(self, event: CpuEvent) -> bool:
        """Always true."""
        return True

    def elapsed_us(self, start: CpuEvent, end: CpuEvent) -> float:
        """Microseconds from one to the other. Raises DeviceError when one is without timing or was never recorded."""
        if not (start.timing and end.timing and start.at and end.at):
            raise DeviceError(
                "the time between two events was asked for", "both must be timing events and recorded", _BUG
            )
        return (end.at - start.at) / 1000

    def begin_capture(self, stream: CpuStream) -> None:
        """Record from now on."""
        if stream.recorded is not None:
            raise DeviceError("a capture was begun", "the stream is being captured already", _BUG)
        stream.recorded = []

    def end_capture(self, stream: CpuStream) -> CpuGraph:
        """Freeze what was recorded."""
        if stream.recorded is None:
            raise DeviceError("a capture was ended", "none was begun", _BUG)
        commands, stream.recorded = stream.recorded, None
        graph = CpuGraph(self._threads.freeze(commands))
        self._graphs.add(graph)
        return graph

    def is_capturing(self, stream: CpuStream) -> bool:
        """Whether ``stream`` records."""
        return stream.recorded is not None

    def launch_graph(self, graph: CpuGraph, stream: CpuStream) -> None:
        """Run every command, in one foreign call that lets other Python threads run; done on return."""
        if stream.recorded is not None:
            raise DeviceError("a graph was launched", "its stream is being captured, and graphs do not nest here", _BUG)
        if graph.commands is None:
            raise DeviceError("a graph was launched", "it was destroyed", _BUG)
        graph.commands.run()

    def destroy_graph(self, graph: CpuGraph) -> None:
        """Give its memory back; safe to call twice."""
        if graph.commands is not None:
            self._threads.thaw(graph.commands)
            self._graphs.discard(graph)
            graph.commands = None

    def close(self) -> None:
        """Destroy the graphs, stop the threads and release all memory."""
        if self._pool is not None:
            for graph in tuple(self._graphs):
                self.destroy_graph(graph)
            self._pool.close()
            self._pool = None
        self._pinned.clear()
        self._memory.close()


def _own(launch: Launch) -> Command:
    if not isinstance(launch, Command):
        raise DeviceError(f"{launch.description} was put on a CPU stream", "it was prepared by another backend", _BUG)
    return launch


def _address(memory: memoryview | bytes) -> int:
    """Where the bytes of a contiguous buffer lie."""
    view = memoryview(memory)
    if not view.contiguous:
        raise DeviceError("a copy of scattered memory was asked for", "only contiguous buffers can be copied", _BUG)
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


def open_backend(library: KernelLibrary, ordinal: int = 0, *, threads: int | None = None) -> CpuBackend:
    """The CPU with ``threads`` threads; None: as many as the process may use. Raises UsageError or DeviceError."""
    if ordinal != 0:
        raise DeviceError(f"there is no CPU {ordinal}", "a host is one device, number 0", "do not name a device")
    if threads is not None and threads < 1:
        raise UsageError(
            f"{threads} threads cannot run anything", "the number includes the calling thread", "use 1 or more"
        )
    missing = machine.missing_features(library.target.arch)
    if missing:
        raise DeviceError(
            f"kernels for {library.target.arch} do not run on {machine.processor_name()}",
            f"it lacks {', '.join(missing)}",
            "build kernels for this machine: atlas kernels build --hw cpu --arch native",
        )
    return CpuBackend(library, threads or machine.usable_processors())
