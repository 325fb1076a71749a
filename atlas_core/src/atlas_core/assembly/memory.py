"""The memory of a plan: what it takes, what is left for the cache, and getting it from the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.assembly.model import Model
from atlas_core.assembly.packed import PackedCache
from atlas_core.assembly.plan import StepPlan
from atlas_core.contracts.backend import GpuBackend, Stream
from atlas_core.contracts.ops import Buffer
from atlas_core.engine.inputs import COUNTS, InputLayout
from atlas_core.loading.ahead import ReadAhead
from atlas_core.loading.drawn import Stretch
from atlas_core.loading.pieces import Placed
from atlas_core.loading.upload import WeightLoading, begin_weights
from atlas_core.model.program import Value
from atlas_core.runtime.bound import StepMemory
from atlas_core.runtime.budget import Budget, KVNeed, Readings, Term, plan_budget
from atlas_core.runtime.loader import WeightCopy, WeightKey, load_arrays, weight_copies
from atlas_core.vocab.errors import BudgetError
from atlas_core.vocab.layout import StorageLayout

DEFAULT_FRACTION = 0.9
"""Of the memory that is free at start; the rest is for drivers, graphs and everybody else."""

GRAPHS = "graphs"
_RECURRENT = "lower --state-snapshots or --max-batch-size"
_NODE_BYTES = 32 * 1024
"""Device memory that a captured node may take; what it does take is measured at the start."""


class Weights(Struct, frozen=True):
    """Every packed copy that has to be loaded, tied weights once, and which copy each use means."""

    copies: tuple[WeightCopy, ...]
    uses: Mapping[WeightKey, WeightKey]

    @classmethod
    def of(cls, plan: StepPlan, model: Model) -> "Weights":
        """From what all buckets chose."""
        unique: dict[WeightKey, WeightCopy] = {}
        uses: dict[WeightKey, WeightKey] = {}
        for copy in weight_copies(segment for bucket in plan.buckets for segment in bucket.segments):
            key = model.store.alias(copy.weight), copy.packed.name
            uses[copy.weight, copy.packed.name] = key
            unique.setdefault(key, replace(copy, weight=key[0]))
        return cls(tuple(unique.values()), uses)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(copy.packed.nbytes for copy in self.copies)


def plan_memory(
    plan: StepPlan, model: Model, weights: Weights, free: int, total: int, *, graphs: int = 0, shared: bool = True
) -> Budget:
    """How many cache pages there are. Raises BudgetError with the whole table when the plan does not fit.

    ``graphs``: captured steps take memory of the device, which is planned here and measured when they are captured: how often each node is.
    ``shared``: other programs live in this memory, of which no more is taken than is asked for or needed.
    """
    settings = plan.settings
    limit = settings.memory if settings.memory is not None else int(free * DEFAULT_FRACTION)
    readings = Readings(total=limit, device_free=free, host_available=free, unified=False)
    page_bytes = sum(
        plan.choices.caches[v.name].page_bytes(*_page(v)) * int(v.shape[0]) for v in _values(plan, "cache")
    )
    need = KVNeed(page_bytes, settings.block_size, plan.max_seq_len, fixed=settings.max_seq_len is not None)
    budget = plan_budget(readings, 1.0, _terms(plan, weights, graphs=graphs), need)
    # More pages than every slot at its longest hold nothing but prefixes.
    if settings.prefix_cache and (settings.memory is not None or not shared):
        return budget
    most = plan.layout.slots.slots * plan.layout.slots.table_blocks[0] if plan.layout.slots.table_blocks else 0
    if budget.pages > most:
        budget = plan_budget(
            readings, 1.0, _terms(plan, weights, graphs=graphs), replace(need, explicit_bytes=most * page_bytes)
        )
    return budget


def with_graphs(budget: Budget, nbytes: int) -> Budget:
    """The budget with what captured steps were measured to take."""
    terms = tuple(replace(term, nbytes=nbytes) if term.name == GRAPHS else term for term in budget.terms)
    return replace(budget, terms=terms)


def _terms(plan: StepPlan, weights: Weights, *, graphs: int) -> tuple[Term, ...]:
    states = {value.name: _nbytes(value) for value in _values(plan, "state")}
    rows = "lower --max-batch-size"
    return (
        Term("weights", weights.nbytes, "use a smaller model or a smaller format"),
        Term("constants", sum(array.nbytes for array in plan.program.constants.values())),
        Term("activations", max(b.arena.nbytes for b in plan.buckets), "lower --max-prefill-tokens"),
        Term("scratch", max(1, *(b.arena.scratch for b in plan.buckets)), "lower --max-prefill-tokens"),
        Term("inputs", max(InputLayout(b.bucket).nbytes for b in plan.buckets), rows),
        *(
            Term(name, nbytes, _RECURRENT if name.startswith("state.") and plan.layout.snapshots else rows)
            for name, nbytes in states.items()
        ),
        *([Term(GRAPHS, graphs * _graph_bytes(plan), rows)] if graphs else []),
    )


def _graph_bytes(plan: StepPlan) -> int:
    return _NODE_BYTES * sum(len(segment.steps) for bucket in plan.buckets for segment in bucket.segments)


def begin_loading(
    backend: GpuBackend, model: Model, weights: Weights, budget: Budget, progress: Callable[[int, int, str], None],
    packed: PackedCache | None = None, ahead: ReadAhead | None = None,
) -> WeightLoading:  # fmt: skip
    """Get memory for the weights from the device, and begin to bring them.

    They come out of the image that ``packed`` has, if it has one. ``ahead`` has what was read of them already.

    Raises BudgetError as ``allocate`` does.
    """
    source = ModelSource(model, weights)
    with _named(budget, "weights"):
        if packed:
            return packed.load(backend, weights.copies, source, progress, ahead)
        return begin_weights(backend, weights.copies, source, ahead)


def allocate(
    backend: GpuBackend, stream: Stream, plan: StepPlan, weights: Weights, budget: Budget, loaded: Mapping[WeightKey, Buffer]
) -> tuple[StepMemory, int, Mapping[str, Buffer]]:  # fmt: skip
    """Get all else from the device: (memory without inputs, address of the input block, states). ``loaded``: where weights lie.

    Raises BudgetError naming the term that there is no room for, which happens when somebody else has taken memory since the plan.
    """

    def get(term: str, nbytes: int) -> Buffer:
        with _named(budget, term):
            return _alloc(backend, nbytes)

    with _named(budget, "constants"):
        values = load_arrays(backend, plan.program.constants)
    states = {v.name: get(v.name, _nbytes(v)) for v in _values(plan, "state")}
    for value in _values(plan, "cache"):
        layer = plan.choices.caches[value.name].page_bytes(*_page(value)) * budget.pages
        values[value.name] = get("KV pages", layer * int(value.shape[0]))
    inputs = get("inputs", max(InputLayout(b.bucket).nbytes for b in plan.buckets)).address
    arena = get("activations", max(b.arena.nbytes for b in plan.buckets))
    scratch = get("scratch", max(1, *(b.arena.scratch for b in plan.buckets)))
    backend.memset_async(scratch.address, 0, scratch.nbytes, stream)
    backend.synchronize(stream)
    uses = {use: loaded[key] for use, key in weights.uses.items()}
    return StepMemory(arena, scratch, 0, {**values, **states}, uses), inputs, states


class ModelSource:
    """The model's weights in the layouts that the plan was made for."""

    def __init__(self, model: Model, weights: Weights) -> None:
        self._model = model
        self._specs = {copy.weight: copy.spec for copy in weights.copies}

    def read(self, weight: str) -> bytes | memoryview:
        """See loading.pieces.WeightSource."""
        return self._model.read(weight, self._layout(weight), self._specs[weight].shape)

    def placed(self, weight: str) -> Placed | None:
        """See loading.pieces.WeightSource."""
        return self._model.placed(weight, self._layout(weight))

    def drawn(self, weight: str) -> Sequence[Stretch] | None:
        """See loading.pieces.WeightSource."""
        return self._model.drawn(weight, self._layout(weight))

    def _layout(self, weight: str) -> StorageLayout:
        layout = self._specs[weight].layout
        assert layout is not None
        return layout


@contextmanager
def _named(budget: Budget, name: str) -> Iterator[None]:
    """Say which term of the budget could not be had, and how to lower it."""
    try:
        yield
    except BudgetError as error:
        term = next(term for term in budget.terms if term.name == name)
        raise BudgetError(
            f"the device has no room for {name}: {term.nbytes} bytes in all",
            f"{error.what}; {error.why}",
            f"end other programs that use this device, or {term.cure or 'lower --memory, which the cache is sized by'}",
        ) from error


def with_inputs(memory: StepMemory, layout: InputLayout, address: int) -> StepMemory:
    """Memory in which the inputs of one bucket lie in the block at ``address``."""
    inputs = layout.buffers(address)
    return replace(memory, counts=inputs[COUNTS].address, values={**memory.values, **inputs})


def _values(plan: StepPlan, kind: str) -> list[Value]:
    """Every value of a kind, once."""
    found = {v.name: v for node in plan.program.nodes for v in node.operands.values() if v.kind == kind}
    return list(found.values())


def _page(cache: Value) -> tuple[int, int]:
    """(key heads, head size) of a cache value [layers, 2, heads, tokens, dim]."""
    return int(cache.shape[2]), int(cache.shape[4])


def _nbytes(value: Value) -> int:
    assert value.dtype is not None
    elements = 1
    for dim in value.shape:
        elements *= int(dim)
    return elements * value.dtype.itemsize


def _alloc(backend: GpuBackend, nbytes: int) -> Buffer:
    return Buffer(backend.alloc(nbytes), nbytes)
