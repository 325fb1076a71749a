"""A backend that tells what it is about to do: when a kernel hangs or faults, the last line names it."""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.contracts.backend import Capabilities, DeviceFacts, GpuBackend, Launch
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs

Sink = Callable[[str], None]


class TraceGraph(Struct, eq=False):
    """A captured graph with the descriptions of its launches."""

    graph: Any
    launches: tuple[str, ...]


class TraceBackend:
    """Passes everything on to ``inner``; each launch, and each launch of a graph, is told to ``sink`` first."""

    def __init__(self, inner: GpuBackend, sink: Sink) -> None:
        # Launches that move a step's inputs and results would not be told of: copies are.
        self.capabilities: Capabilities = replace(inner.capabilities, host_link=False)
        self._inner = inner
        self._sink = sink
        self._captures: dict[int, list[str]] = {}

    def enqueue(self, launch: Launch, stream: Any) -> None:
        """Tell, then enqueue; inside a capture the line says so, for the kernel runs later."""
        captured = self._captures.get(id(stream))
        if captured is not None:
            captured.append(launch.description)
        self._sink(f"{'capture' if captured is not None else 'launch'} {launch.description}")
        self._inner.enqueue(launch, stream)

    def begin_capture(self, stream: Any) -> None:
        """See GpuBackend."""
        self._inner.begin_capture(stream)
        self._captures[id(stream)] = []

    def end_capture(self, stream: Any) -> TraceGraph:
        """See GpuBackend."""
        launches = tuple(self._captures.pop(id(stream), ()))
        return TraceGraph(self._inner.end_capture(stream), launches)

    def launch_graph(self, graph: TraceGraph, stream: Any) -> None:
        """Tell every launch of the graph, then launch it."""
        for index, description in enumerate(graph.launches):
            self._sink(f"replay {index + 1}/{len(graph.launches)} {description}")
        self._inner.launch_graph(graph.graph, stream)

    def destroy_graph(self, graph: TraceGraph) -> None:
        """See GpuBackend."""
        self._inner.destroy_graph(graph.graph)

    def facts(self) -> DeviceFacts:
        """See GpuBackend."""
        return self._inner.facts()

    def bind_to_thread(self) -> None:
        """See GpuBackend."""
        self._inner.bind_to_thread()

    def alloc(self, nbytes: int) -> int:
        """See GpuBackend."""
        return self._inner.alloc(nbytes)

    def free(self, address: int) -> None:
        """See GpuBackend."""
        self._inner.free(address)

    def alloc_pinned(self, nbytes: int) -> memoryview:
        """See GpuBackend."""
        return self._inner.alloc_pinned(nbytes)

    def free_pinned(self, memory: memoryview) -> None:
        """See GpuBackend."""
        self._inner.free_pinned(memory)

    def memory(self) -> tuple[int, int]:
        """See GpuBackend."""
        return self._inner.memory()

    def copy_h2d(self, source: memoryview | bytes, target: int) -> None:
        """See GpuBackend."""
        self._inner.copy_h2d(source, target)

    def copy_d2h(self, source: int, target: memoryview) -> None:
        """See GpuBackend."""
        self._inner.copy_d2h(source, target)

    def copy_h2d_async(self, source: memoryview, target: int, stream: Any) -> None:
        """See GpuBackend."""
        self._inner.copy_h2d_async(source, target, stream)

    def copy_d2h_async(self, source: int, target: memoryview, stream: Any) -> None:
        """See GpuBackend."""
        self._inner.copy_d2h_async(source, target, stream)

    def copy_d2d_async(self, source: int, target: int, nbytes: int, stream: Any) -> None:
        """See GpuBackend."""
        self._inner.copy_d2d_async(source, target, nbytes, stream)

    def memset_async(self, target: int, value: int, nbytes: int, stream: Any) -> None:
        """See GpuBackend."""
        self._inner.memset_async(target, value, nbytes, stream)

    def kernel(self, module: str, entry: str) -> Any:
        """See GpuBackend."""
        return self._inner.kernel(module, entry)

    def prepare_launch(
        self, kernel: Any, geometry: Geometry, args: Sequence[Arg], attrs: LaunchAttrs | None = None
    ) -> Launch:
        """See GpuBackend."""
        return self._inner.prepare_launch(kernel, geometry, args, attrs)

    def create_stream(self) -> Any:
        """See GpuBackend."""
        return self._inner.create_stream()

    def synchronize(self, stream: Any) -> None:
        """See GpuBackend."""
        self._inner.synchronize(stream)

    def create_event(self, *, timing: bool = False) -> Any:
        """See GpuBackend."""
        return self._inner.create_event(timing=timing)

    def record_event(self, event: Any, stream: Any) -> None:
        """See GpuBackend."""
        self._inner.record_event(event, stream)

    def wait_event(self, event: Any) -> None:
        """See GpuBackend."""
        self._inner.wait_event(event)

    def query_event(self, event: Any) -> bool:
        """See GpuBackend."""
        return self._inner.query_event(event)

    def elapsed_us(self, start: Any, end: Any) -> float:
        """See GpuBackend."""
        return self._inner.elapsed_us(start, end)

    def is_capturing(self, stream: Any) -> bool:
        """See GpuBackend."""
        return self._inner.is_capturing(stream)

    def close(self) -> None:
        """See GpuBackend."""
        self._inner.close()
