"""GpuBackend: what a machine must offer at run time. The CPU is one more such machine."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs

Stream = Any
Event = Any
Graph = Any
KernelHandle = Any


class Capabilities(Struct, frozen=True):
    """What is real on this backend; nothing is emulated behind a False.

    ``asynchronous``: enqueue and launch_graph return before the work is done, so the engine runs one step ahead.
    ``bucketed``: grids are fixed when a graph is captured, so the engine captures one graph per bucket of rows.
    ``unified_memory``: device addresses may be read and written by the host, and kernels may read page-locked host memory.
    ``event_timing``: events know when they were reached. ``host_link``: kernels read and write page-locked host memory in place, and the backend
    is a HostLink.
    """

    asynchronous: bool
    bucketed: bool
    unified_memory: bool
    event_timing: bool = False
    host_link: bool = False


class DeviceFacts(Struct, frozen=True):
    """What the running device says of itself: ``arch`` as in HARDWARE.toml, bytes of memory, processors (SMs or cores)."""

    name: str
    arch: str
    total_memory: int
    processors: int
    driver: str = ""


class Launch(Protocol):
    """A kernel with its geometry and packed arguments, ready to be enqueued any number of times.

    ``description`` names kernel, geometry and arguments; it is what a failed launch shows.
    """

    @property
    def description(self) -> str:
        """Kernel, geometry and arguments, on one line."""
        ...


@runtime_checkable
class GpuBackend(Protocol):
    """One device, used by one thread at a time after ``bind_to_thread``.

    Addresses are ints. Every method raises DeviceError with the driver's own words; ``sticky`` is set when the context is lost.
    Memory from ``alloc`` is not cleared and is at least 256-byte aligned.
    """

    capabilities: Capabilities

    def facts(self) -> DeviceFacts:
        """What the device is. Raises DeviceError when it went away."""
        ...

    def bind_to_thread(self) -> None:
        """Make this device current for the calling thread. Cheap; a no-op when it already is."""
        ...

    def alloc(self, nbytes: int) -> int:
        """Device memory. Raises BudgetError when there is not enough, with the free bytes in the text."""
        ...

    def free(self, address: int) -> None:
        """Give memory back; the caller promises that no queued work uses it."""
        ...

    def alloc_pinned(self, nbytes: int) -> memoryview:
        """Page-locked host memory, writable, that the device can copy from and to at full speed."""
        ...

    def free_pinned(self, memory: memoryview) -> None:
        """Give page-locked memory back."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of device memory now."""
        ...

    def copy_h2d(self, source: memoryview | bytes, target: int) -> None:
        """Host to device, done on return."""
        ...

    def copy_d2h(self, source: int, target: memoryview) -> None:
        """Device to host, done on return; waits for work queued before on the default stream only."""
        ...

    def copy_h2d_async(self, source: memoryview, target: int, stream: Stream) -> None:
        """Pinned host to device, in stream order; ``source`` must not change until then."""
        ...

    def copy_d2h_async(self, source: int, target: memoryview, stream: Stream) -> None:
        """Device to pinned host, in stream order; ``target`` is valid after an event recorded behind it."""
        ...

    def copy_d2d_async(self, source: int, target: int, nbytes: int, stream: Stream) -> None:
        """Device to device, in stream order; the ranges must not overlap."""
        ...

    def memset_async(self, target: int, value: int, nbytes: int, stream: Stream) -> None:
        """Set every byte to ``value``, in stream order."""
        ...

    def kernel(self, module: str, entry: str) -> KernelHandle:
        """Find a compiled entry. Raises KernelError naming module, entry, target and the building command when absent."""
        ...

    def prepare_launch(
        self, kernel: KernelHandle, geometry: Geometry, args: Sequence[Arg], attrs: LaunchAttrs | None = None
    ) -> Launch:
        """Check kinds and number of ``args`` against the manifest and the geometry against the device, and pack them.

        Raises KernelError naming the parameter that does not fit, ResidencyError when clusters that wait for each other
        cannot all run at once.
        """
        ...

    def enqueue(self, launch: Launch, stream: Stream) -> None:
        """Put a launch on a stream; inside a capture it becomes a node. Raises DeviceError with the launch's description."""
        ...

    def create_stream(self) -> Stream:
        """A new ordered queue of work."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Wait until everything queued on ``stream`` is done; errors of that work surface here."""
        ...

    def create_event(self, *, timing: bool = False) -> Event:
        """A marker in a stream; ``timing`` only when ``capabilities.event_timing``."""
        ...

    def record_event(self, event: Event, stream: Stream) -> None:
        """Mark the present end of ``stream``."""
        ...

    def wait_event(self, event: Event) -> None:
        """Block the host until the recorded work is done; returns at once when the event was never recorded."""
        ...

    def query_event(self, event: Event) -> bool:
        """Whether the recorded work is done, without waiting."""
        ...

    def elapsed_us(self, start: Event, end: Event) -> float:
        """Microseconds between two timing events that are both done."""
        ...

    def begin_capture(self, stream: Stream) -> None:
        """From now on work enqueued on ``stream`` is recorded instead of run."""
        ...

    def end_capture(self, stream: Stream) -> Graph:
        """The recorded work as an object that can be replayed. Raises DeviceError when the capture was invalidated."""
        ...

    def is_capturing(self, stream: Stream) -> bool:
        """Whether ``stream`` is being captured: nothing may synchronise then."""
        ...

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        """Replay; arguments are as captured, memory contents as they are now."""
        ...

    def destroy_graph(self, graph: Graph) -> None:
        """Give a graph's resources back."""
        ...

    def close(self) -> None:
        """Release everything; the object is of no more use. Safe to call twice."""
        ...


class HostRing(Struct, frozen=True):
    """``places`` equal places of page-locked ``memory`` that steps use in turn.

    ``turn`` is the device address of an int32 that counts the steps begun: a step's place is what it was, modulo ``places``.
    """

    memory: memoryview
    places: int
    turn: int

    @property
    def stride(self) -> int:
        """Bytes of one place."""
        return self.memory.nbytes // self.places


class StepResults(Struct, frozen=True):
    """Device addresses of what a step leaves: int32 ``sampled`` [rows], float32 ``values`` and int32 ``ids`` [rows, ``wide``].

    ``counts`` are the live counts, ``rows`` the most rows of any step: in a place of the ring the three lie one behind the other for so
    many rows.
    """

    sampled: int
    values: int
    ids: int
    counts: int
    rows: int
    wide: int


@runtime_checkable
class HostLink(Protocol):
    """A backend whose kernels bring inputs and deliver results themselves, so that a step is one graph and nothing else."""

    def prepare_fetch(self, ring: HostRing, target: int, fixed: int) -> Launch:
        """Copy ``fixed`` int32 words and two for each update from the next step's place to ``target``; the turn moves on.

        The live counts come first in a place (ops.step.Count), and tell how many updates there are.
        """
        ...

    def prepare_deliver(self, ring: HostRing, results: StepResults) -> Launch:
        """Write the results of the step last fetched to its place: all live ``sampled``, and the rows of ``values`` and ``ids`` whose
        first id is not negative; of others that id alone.
        """
        ...


class HostRooms(Struct, frozen=True):
    """Rooms of ``nbytes`` each, one behind another from ``address`` on: one for each thread that brings loads."""

    address: int
    nbytes: int


class HostLoad(Struct, frozen=True):
    """``nbytes`` from ``start`` of an open file, the address in the first room they are read to, and the launches that use them there.

    In another room, addresses of the first that launches were given mean the same places of that one.
    """

    descriptor: int
    start: int
    nbytes: int
    address: int
    launches: tuple[Launch, ...]


class LoadState(IntEnum):
    """What has become of a HostLoad. LEFT: not all of it was in the page cache, or cannot be read; nothing was launched."""

    WAITING = 0
    DONE = 1
    LEFT = 2


class HostLoads(Protocol):
    """A list of loads, each of which is brought once."""

    def run(self, room: int, most: int) -> bool:
        """Bring up to ``most`` loads, in order, that no other thread has taken; whether there may be more.

        A room belongs to one thread at a time. Other threads of Python run meanwhile.
        """
        ...

    def stop(self) -> None:
        """Take no more; ``run`` returns once what was taken is there."""
        ...

    def states(self) -> bytes:
        """One LoadState for each load, as they are now."""
        ...


@runtime_checkable
class Forewarned(Protocol):
    """A backend that can get memory ready before anybody asks for it."""

    def expect(self, nbytes: int) -> None:
        """So many bytes will most likely be allocated soon. What is got for them meanwhile counts as free until they are."""
        ...


@runtime_checkable
class HostRunner(Protocol):
    """A backend whose launches are calls of functions: any thread may run one, whatever other threads do."""

    def run_here(self, launch: Launch) -> None:
        """Run a launch on the calling thread, beside all streams; done on return. A grid of 0 tasks is one task."""
        ...


@runtime_checkable
class HostLoader(Protocol):
    """A HostRunner that also reads files, so that not a word of Python comes between what is read and what uses it."""

    def prepare_copy(self, source: int, target: int, nbytes: int) -> Launch:
        """The launch that copies bytes from one address to another."""
        ...

    def prepare_loads(self, loads: Sequence[HostLoad], rooms: HostRooms) -> HostLoads:
        """Loads out of the page cache."""
        ...
