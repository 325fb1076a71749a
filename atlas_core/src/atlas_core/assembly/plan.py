"""From model, machine and settings to a plan: what every node of the step runs, for every bucket of rows."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.assembly.machine import Machine
from atlas_core.assembly.model import TRANSCODED, Model
from atlas_core.model.arena import Arena, place
from atlas_core.model.builder import StepLayout, record
from atlas_core.model.matching import Pattern
from atlas_core.model.planner import Bucket, Choices, Context, PlannedSegment, Planner
from atlas_core.model.program import Program
from atlas_core.model.work import even_context
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.step import SlotLayout
from atlas_core.scheduler.limits import Limits
from atlas_core.settings import Settings, with_defaults
from atlas_core.settings.kinds import read_filling
from atlas_core.settings.sources import Level, Source
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import ResolveError, UsageError
from atlas_core.vocab.layout import StorageLayout

DEFAULT_MAX_SEQ_LEN = 32768
DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PREFILL_TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192)
BIAS_PAIRS = 1024
"""Pool of logit_bias entries of all running sequences: three full ones of 300, and room for suppressed end tokens."""


class PlannedBucket(Struct, frozen=True):
    """One bucket's plan and the memory its activations need."""

    bucket: Bucket
    segments: tuple[PlannedSegment, ...]
    arena: Arena


class StepPlan(Struct, frozen=True):
    """Everything that is known before a device is touched."""

    settings: Settings
    max_seq_len: int
    layout: StepLayout
    program: Program
    buckets: tuple[PlannedBucket, ...]
    choices: Choices
    weights: Mapping[str, StorageLayout]


def settled(settings: Settings, machine: Machine) -> Settings:
    """Settings with what the machine's makers measured to be best, wherever nobody said otherwise."""
    for hardware in machine.chain:
        values = {default.setting: default.value for default in hardware.defaults}
        # An elder's proposal is of the same level, so it does not overrule what stands already.
        settings = with_defaults(settings, values, Source(Level.HARDWARE, f"{hardware.name}/HARDWARE.toml"))
    return settings


def make_plan(model: Model, machine: Machine, settings: Settings, processors: int | None = None) -> StepPlan:
    """Record the model's step and cover it for every bucket. ``processors``: the device's, if it has others than the machine declares.

    Raises ResolveError for a node that nobody runs; it offers ``--transcode`` where that helps, with what it costs. Raises
    KernelError when kernels of the model's plugin are lost.
    """
    processors = processors or machine.processors
    settings = _reusing(settled(settings, machine), model)
    machine.tree.require_roots(model.kernel_packages)
    try:
        return _planned(model, machine, settings, processors)
    except ResolveError as error:
        offers = list(_transcodings(model, machine, settings, processors)) if settings.transcode == "none" else []
        if not offers:
            raise
        raise ResolveError(error.what, error.why, f"pass {' or '.join(offers)}; or {error.cure}") from error


def _reusing(settings: Settings, model: Model) -> Settings:
    """Settings without a prefix cache where the model has recurrent states and no snapshots of them shall be kept, or embeds texts.

    Raises UsageError when it was asked for all the same: pages alone do not bring such a sequence forward, and hidden states of
    tokens that are not computed again are part of no vector.
    """
    if model.pooling is not None and settings.prefix_cache:
        asked = settings.source("prefix_cache")
        if asked.level > Level.MODEL:
            raise UsageError(
                f"{asked} asks for a prefix cache",
                "this model embeds texts, and needs every token of each",
                "leave it out",
            )
        return with_defaults(settings, {"prefix_cache": False}, Source(Level.MODEL, "it embeds texts"))
    if not _recurrent(model) or settings.state_snapshots or not settings.prefix_cache:
        return settings
    cause, asked = settings.source("state_snapshots"), settings.source("prefix_cache")
    if asked.level > Level.MODEL:
        raise UsageError(
            f"{asked} asks for a prefix cache, and {cause} for no snapshots of recurrent states",
            f"layers of {model.spec.model_type} have such states, and pages alone do not bring a sequence forward",
            "leave one of the two out",
        )
    return with_defaults(settings, {"prefix_cache": False}, Source(Level.MODEL, f"{cause} 0, and recurrent states"))


def _recurrent(model: Model) -> bool:
    return any(not cache.paged for cache in model.spec.caches)


def _transcodings(model: Model, machine: Machine, settings: Settings, processors: int | None) -> Iterator[str]:
    """Values of ``--transcode`` with which there would be a plan, with the memory of the weights then and as stored."""
    for name in TRANSCODED:
        try:
            plan = _planned(model, machine, replace(settings, transcode=name), processors)
        except ResolveError:
            continue
        copies = {
            (model.store.alias(weight), packed.name): packed.nbytes
            for (weight, _), packed in plan.choices.packings.items()
        }
        tensors = {weight: model.store.layout(weight).nbytes(shape) for weight, shape in _shapes(model, plan).items()}
        yield (
            f"--transcode {name} (weights take {sum(copies.values()) / 2**20:.1f} MiB in place of "
            f"{sum(tensors.values()) / 2**20:.1f} MiB)"
        )


def _shapes(model: Model, plan: StepPlan) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, tied ones once."""
    return {model.store.alias(v.name): tuple(int(dim) for dim in v.shape) for v in plan.program.weights()}


def _planned(model: Model, machine: Machine, settings: Settings, processors: int | None) -> StepPlan:
    max_seq_len = _max_seq_len(model, settings)
    pages = -(-max_seq_len // settings.block_size)
    slots = settings.max_batch_size
    layout = StepLayout(
        SlotLayout(slots, (pages,) * sum(cache.paged for cache in model.spec.caches), BIAS_PAIRS),
        settings.block_size,
        DType(settings.dtype),
        slots,
        settings.state_snapshots if settings.prefix_cache and _recurrent(model) else 0,
    )
    program = record(model.loader, model.spec, layout, model.own.ops, hidden=model.pooling is not None)
    if settings.count_experts:
        program = _counted(program, settings, embeds=model.pooling is not None)
    weights = model.storage(program.weights(), settings.transcode)
    patterns = tuple(Pattern.of(fused, PRIMITIVES) for fused in machine.fused)
    implementations = (*model.own.of([each.name for each in machine.chain]), *machine.implementations)
    context = Context(
        machine.arch, settings.numerics, layout.activation, weights, implementations, patterns, processors
    )
    choices = Choices()
    planner = Planner(program, context, choices)
    planned = []
    limits = make_limits(model, settings, layout, max_seq_len, layout.slots.table_blocks, program)
    wanted = buckets(settings, limits, machine.declaration.bucketed)
    if model.pooling is not None:
        wanted = embedding_buckets(wanted, slots)
    for bucket in wanted:
        segments = planner.plan(bucket)
        planned.append(PlannedBucket(bucket, segments, place(program, segments, bucket)))
    return StepPlan(settings, max_seq_len, layout, program, tuple(planned), choices, weights)


def _counted(program: Program, settings: Settings, *, embeds: bool) -> Program:
    """The program with its routers' choices among its results, so that no fused op may hide them."""
    if embeds or not program.choices:
        raise UsageError(
            f"{settings.source('count_experts')} asks to count experts",
            "this model embeds texts" if embeds else "this model has none",
            "leave it out",
        )
    return replace(program, results=(*program.results, *program.choices))


def make_limits(
    model: Model, settings: Settings, layout: StepLayout, max_seq_len: int, pages: tuple[int, ...], program: Program
) -> Limits:
    """The scheduler's limits, with ``pages`` of each cache group. Raises BudgetError when one sequence would not fit.

    The line is a little longer than what the server lets in, since the server learns of a free place before the engine does.
    """
    mixed, steps = settings.max_mixed_tokens, mixed_steps(settings)
    # Sizes that fill the machine are whole tiles of its kernels.
    tile = gcd(*(size for size, _ in steps)) or 1
    even = even_context(program, mixed, tile) if mixed else None
    even = even and max(1, round(even / settings.attention_cost))
    return Limits(
        layout.slots, layout.page_tokens, pages, model.spec.vocab_size, max_seq_len, settings.max_prefill_tokens,
        layout.penalty_rows, settings.max_queue + layout.slots.slots, max_mixed_tokens=mixed, mixed_steps=steps,
        even_context=even, prefix_cache=settings.prefix_cache,
        snapshots=layout.snapshots,
    )  # fmt: skip


def mixed_steps(settings: Settings) -> tuple[tuple[int, int], ...]:
    """``Settings.mixed_steps`` as Limits have them. Raises UsageError when more tokens cost no more."""
    steps = sorted(read_filling(step) for step in settings.mixed_steps)
    for (size, cost), (larger, dearer) in pairwise(steps):
        if larger == size or dearer <= cost:
            raise UsageError(
                f"{settings.source('mixed_steps')} says that {larger} tokens cost {dearer} and {size} cost {cost}",
                "a step with more tokens takes longer", "give every size once, with what it costs",
            )  # fmt: skip
    return tuple(steps)


def buckets(settings: Settings, limits: Limits, bucketed: bool) -> tuple[Bucket, ...]:
    """The closed list of shapes that are captured, smallest first.

    A backend that reads live counts everywhere needs one; others get one for each number of decoding rows, then one for each
    number of tokens in a step that holds prompts, those of mixed steps among them: their sizes, up to the most.
    """
    rows = settings.max_batch_size
    longest = min(settings.max_prefill_tokens, limits.max_seq_len)
    tokens, updates = limits.max_step_tokens, limits.max_updates
    largest = Bucket(tokens, rows, rows, updates, longest)
    if not bucketed:
        return (largest,)
    decode = [r for r in DECODE_ROWS if r < rows] + [rows]
    mixed = settings.max_mixed_tokens or tokens
    often = {*PREFILL_TOKENS, mixed}
    if settings.max_mixed_tokens:
        often.update(size for size, _ in limits.mixed_steps if size < mixed)
    prefill = [t for t in sorted(often) if rows < t < tokens] + [tokens]
    return (
        *(Bucket(r, r, r, updates, 1) for r in decode),
        *(replace(largest, tokens=t, max_query=min(t, longest)) for t in prefill),
    )


def embedding_buckets(found: Sequence[Bucket], slots: int) -> tuple[Bucket, ...]:
    """Of ``found`` those that take prompts, with room for what the host tells of positions (see engine.embedding)."""
    return tuple(replace(bucket, updates=bucket.updates + slots) for bucket in found if bucket.max_query > 1)


def _max_seq_len(model: Model, settings: Settings) -> int:
    limit = model.spec.max_position
    if settings.max_seq_len is None:
        return min(limit, DEFAULT_MAX_SEQ_LEN)
    if settings.max_seq_len > limit:
        raise UsageError(
            f"--max-seq-len {settings.max_seq_len} is more than the model's {limit}",
            "its positions are not defined beyond that",
            f"use at most {limit}",
        )
    return settings.max_seq_len
