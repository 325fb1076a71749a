"""A planned step bound to memory and captured: what the engine launches."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

from msgspec import Struct, field

from atlas_core.contracts.backend import GpuBackend, Graph, Launch, Stream
from atlas_core.contracts.ops import BindContext, Buffer
from atlas_core.runtime.capture import captured
from atlas_core.runtime.loader import WeightKey
from atlas_core.runtime.plan import Placement, PlanSegment, PlanStep
from atlas_core.vocab.errors import EngineError


class StepMemory(Struct, frozen=True):
    """Where everything lies that a step touches.

    ``arena`` and ``scratch`` may be larger than one bucket needs and be shared by all buckets, which never run at once.
    ``counts`` is the address of the live counts; ``values`` has constants, inputs, states and caches by value name.
    """

    arena: Buffer
    scratch: Buffer
    counts: int
    values: Mapping[str, Buffer]
    weights: Mapping[WeightKey, Buffer]


WHOLE = "step"
"""The graph of all segments, which a frame brings with it."""


class Frame(Protocol):
    """What happens before the first segment of a step and behind the last."""

    def begin(self) -> Sequence[Launch]:
        """Launches before the first."""
        ...

    def end(self, activations: Mapping[str, Buffer], counts: int) -> Sequence[Launch]:
        """Launches behind the last, given where results lie and the address of the live counts."""
        ...


class BoundStep(Struct):
    """One bucket, ready to run: a graph for each segment, with a frame one of all; ``activations`` tells where results are read.

    ``kept`` is memory that launches keep for themselves (BindContext.keep).
    """

    backend: GpuBackend
    activations: Mapping[str, Buffer]
    graphs: dict[str, Graph] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)

    def launch(self, segment: str, stream: Stream) -> None:
        """Replay a segment on ``stream``. Raises KeyError for a segment that the program does not have."""
        self.backend.launch_graph(self.graphs[segment], stream)

    def keep(self, data: bytes) -> int:
        """See BindContext."""
        address = self.backend.alloc(len(data))
        self.kept.append(address)
        self.backend.copy_h2d(data, address)
        return address

    def destroy(self) -> None:
        """Give the graphs and their memory back; nothing queued may use them any more."""
        for graph in self.graphs.values():
            self.backend.destroy_graph(graph)
        self.graphs.clear()
        for address in self.kept:
            self.backend.free(address)
        self.kept.clear()


def bind_step(
    backend: GpuBackend, segments: Iterable[PlanSegment], placement: Placement, memory: StepMemory, stream: Stream,
    frame: Frame | None = None,
) -> BoundStep:  # fmt: skip
    """Bind every step of every segment and capture each segment on ``stream``; nothing runs yet.

    With a frame its launches are part of the first and of the last segment, and a graph WHOLE has all of them.

    Raises EngineError when memory is too small or a value has none, and whatever an implementation's bind or the capture raises;
    graphs captured before are destroyed then.
    """
    _fits("the arena", memory.arena, placement.nbytes)
    _fits("the scratch", memory.scratch, placement.scratch)
    workers = backend.facts().processors
    step = BoundStep(backend, _activations(segments := tuple(segments), placement, memory.arena))
    try:
        graphs: dict[str, list[Launch]] = {
            segment.name: [launch for node in segment.steps for launch in _bind(step, node, memory, workers)]
            for segment in segments
        }
        if frame is not None:
            graphs[segments[0].name][:0] = frame.begin()
            graphs[segments[-1].name] += frame.end(step.activations, memory.counts)
            graphs[WHOLE] = [launch for launches in graphs.values() for launch in launches]
        for name, launches in graphs.items():
            step.graphs[name] = captured(backend, launches, stream)
            step.launches[name] = len(launches)
    except BaseException:
        step.destroy()
        raise
    return step


def _bind(bound: BoundStep, step: PlanStep, memory: StepMemory, workers: int) -> Iterable[Any]:
    operands = {}
    for name, value in step.node.operands.items():
        if value.kind == "weight":
            found = memory.weights.get((value.name, step.packings[name].name))
        else:
            found = (bound.activations if value.kind == "activation" else memory.values).get(value.name)
        if found is None:
            raise EngineError(
                f"{value.kind} {value.name} has no memory",
                f"{step.implementation.name} needs it as {name} of {step.need.op}",
                "this is a fault of the start-up, not of the model",
                state="loading",
            )
        operands[name] = found
    context = BindContext(bound.backend, operands, memory.counts, memory.scratch, workers, bound.keep)
    return step.implementation.bind(step.need, context)


def _activations(segments: Iterable[PlanSegment], placement: Placement, arena: Buffer) -> dict[str, Buffer]:
    buffers = {}
    for segment in segments:
        for step in segment.steps:
            for name, value in step.node.operands.items():
                if value.kind == "activation":
                    spec = step.need.operands[name]
                    nbytes = prod(spec.shape) * spec.dtype.itemsize
                    buffers[value.name] = Buffer(arena.address + placement.offsets[value.name], nbytes)
    return buffers


def _fits(what: str, buffer: Buffer, nbytes: int) -> None:
    if buffer.nbytes < nbytes:
        raise EngineError(
            f"{what} has {buffer.nbytes} bytes", f"this bucket needs {nbytes}", "it must be sized for the largest bucket",
            state="loading",
        )  # fmt: skip
