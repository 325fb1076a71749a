"""A planned step bound to memory and captured: what the engine launches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from atlas_core.contracts.backend import GpuBackend, Graph, Stream
from atlas_core.contracts.ops import BindContext, Buffer
from atlas_core.runtime.loader import WeightKey
from atlas_core.runtime.plan import Placement, PlanSegment, PlanStep
from atlas_core.vocab.errors import EngineError


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Where everything lies that a step touches.

    ``arena`` and ``scratch`` may be larger than one bucket needs and be shared by all buckets, which never run at once.
    ``counts`` is the address of the live counts; ``values`` has constants, inputs, states and caches by value name.
    """

    arena: Buffer
    scratch: Buffer
    counts: int
    values: Mapping[str, Buffer]
    weights: Mapping[WeightKey, Buffer]


@dataclass
class BoundStep:
    """One bucket, ready to run: a graph for each segment; ``activations`` tells where results are read."""

    backend: GpuBackend
    activations: Mapping[str, Buffer]
    graphs: dict[str, Graph] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)

    def launch(self, segment: str, stream: Stream) -> None:
        """Replay a segment on ``stream``. Raises KeyError for a segment that the program does not have."""
        self.backend.launch_graph(self.graphs[segment], stream)

    def destroy(self) -> None:
        """Give the graphs back; nothing queued may use them any more."""
        for graph in self.graphs.values():
            self.backend.destroy_graph(graph)
        self.graphs.clear()


def bind_step(
    backend: GpuBackend, segments: Iterable[PlanSegment], placement: Placement, memory: StepMemory, stream: Stream
) -> BoundStep:
    """Bind every step of every segment and capture each segment on ``stream``; nothing runs yet.

    Raises EngineError when memory is too small or a value has none, and whatever an implementation's bind or the capture raises;
    graphs captured before are destroyed then.
    """
    _fits("the arena", memory.arena, placement.nbytes)
    _fits("the scratch", memory.scratch, placement.scratch)
    workers = backend.facts().processors
    step = BoundStep(backend, _activations(segments := tuple(segments), placement, memory.arena))
    try:
        for segment in segments:
            launches = [
                launch for node in segment.steps for launch in _bind(backend, node, step.activations, memory, workers)
            ]
            backend.begin_capture(stream)
            try:
                for launch in launches:
                    backend.enqueue(launch, stream)
            finally:
                step.graphs[segment.name] = backend.end_capture(stream)
            step.launches[segment.name] = len(launches)
    except BaseException:
        step.destroy()
        raise
    return step


def _bind(
    backend: GpuBackend, step: PlanStep, activations: Mapping[str, Buffer], memory: StepMemory, workers: int
) -> Iterable[Any]:
    operands = {}
    for name, value in step.node.operands.items():
        if value.kind == "weight":
            found = memory.weights.get((value.name, step.packings[name].name))
        else:
            found = (activations if value.kind == "activation" else memory.values).get(value.name)
        if found is None:
            raise EngineError(
                f"{value.kind} {value.name} has no memory",
                f"{step.implementation.name} needs it as {name} of {step.need.op}",
                "this is a fault of the start-up, not of the model",
                state="loading",
            )
        operands[name] = found
    context = BindContext(backend, operands, memory.counts, memory.scratch, workers)
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
