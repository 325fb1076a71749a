"""What this machine can do at most: bytes a second that kernels read, and what a node of a graph costs."""

import statistics
from dataclasses import dataclass

from atlas_core.contracts.backend import GpuBackend, Launch
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, i64, ptr

STREAM = 8 << 30
NODES = 400
_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Ceilings:
    """``read`` in bytes a second; ``node`` and ``early_node`` in microseconds, the latter with programmatic launch."""

    read: float
    node: float
    early_node: float


def replay(backend: GpuBackend, launches: list[Launch], repeats: int = 9) -> float:
    """Microseconds of a graph of these launches, the median of its replays."""
    stream = backend.create_stream()
    backend.begin_capture(stream)
    for launch in launches:
        backend.enqueue(launch, stream)
    graph = backend.end_capture(stream)
    start, end = backend.create_event(timing=True), backend.create_event(timing=True)

    def once() -> float:
        backend.record_event(start, stream)
        backend.launch_graph(graph, stream)
        backend.record_event(end, stream)
        backend.wait_event(end)
        return backend.elapsed_us(start, end)

    times = [once() for _ in range(repeats)]
    backend.destroy_graph(graph)
    return statistics.median(times[1:])


def measure(backend: GpuBackend) -> Ceilings:
    """Both, on an idle device with room for 8 GiB."""
    kernel, processors = backend.kernel("measure", "read_stream"), backend.facts().processors
    memory, never = backend.alloc(STREAM), backend.alloc(4)
    stream = backend.create_stream()
    backend.memset_async(memory, 0x5A, STREAM, stream)
    backend.synchronize(stream)

    def reads(nbytes: int, blocks: int, *, overlap: bool) -> Launch:
        args = [ptr(memory), i64(nbytes // 16), ptr(never)]
        return backend.prepare_launch(
            kernel, Geometry((blocks, 1, 1), (_THREADS, 1, 1)), args, LaunchAttrs(overlap=overlap)
        )

    microseconds = replay(backend, [reads(STREAM, 2 * processors, overlap=False)])
    node, early = (replay(backend, [reads(0, 1, overlap=overlap)] * NODES) / NODES for overlap in (False, True))
    backend.free(memory)
    backend.free(never)
    return Ceilings(STREAM / microseconds * 1e6, node, early)
