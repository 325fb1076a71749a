"""From settings to a running engine, in the engine process: resolve, budget, weights, graphs, preflight."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from atlas_core.assembly.aside import Aside
from atlas_core.assembly.early import begin_reading, large_files
from atlas_core.assembly.environment import discover_plugins, start_folder
from atlas_core.assembly.garbage import kept_waiting
from atlas_core.assembly.kept import start as starts
from atlas_core.assembly.machine import Machine, choose_machine
from atlas_core.assembly.memory import Weights, allocate, begin_loading, plan_memory, with_graphs, with_inputs
from atlas_core.assembly.model import Model, open_model
from atlas_core.assembly.packed import PackedCache
from atlas_core.assembly.plan import StepPlan, make_limits, make_plan, settled
from atlas_core.assembly.settings import decode_settings
from atlas_core.contracts.backend import Forewarned, GpuBackend, Stream
from atlas_core.contracts.checkpoint import Pooling
from atlas_core.contracts.ops import Buffer
from atlas_core.engine.embedding import EmbeddingRunner
from atlas_core.engine.grammar import Grammars
from atlas_core.engine.inputs import InputLayout
from atlas_core.engine.loop import Engine
from atlas_core.engine.rings import Results, Rings
from atlas_core.engine.runner import Runner
from atlas_core.kernels.library import KernelLibrary
from atlas_core.loading.ahead import ReadAhead
from atlas_core.model.config import token_ids
from atlas_core.plugins import Registry
from atlas_core.plugins.load import load
from atlas_core.runtime.bound import StepMemory, bind_step
from atlas_core.runtime.budget import Budget
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import Level, Settings
from atlas_core.text.tokenizer import Tokenizer
from atlas_core.vocab.errors import DeviceError, KernelError, UsageError
from atlas_core.vocab.messages import Generate, LedgerEntry, Progress, Ready
from atlas_core.vocab.sampling import SamplingParams
from atlas_core.vocab.target import Target

Report = Callable[[Progress], None]
_PREFLIGHT_TOKENS = 4


class Ledger:
    """Seconds and bytes of every phase of the start; says what it is doing while it does it."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.perf_counter) -> None:
        self._report = report
        self._clock = clock
        self._phase = ""
        self._bytes = 0
        self.entries: list[LedgerEntry] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside. A phase may be taken up again, when another has been gone through beside it."""
        self._phase, self._bytes = name, 0
        self._report(Progress(name, 0, 0))
        start = self._clock()
        yield
        seconds = self._clock() - start
        known = {entry.phase: place for place, entry in enumerate(self.entries)}
        if name in known:
            before = self.entries[known[name]]
            self.entries[known[name]] = LedgerEntry(name, before.seconds + seconds, before.bytes + self._bytes)
        else:
            self.entries.append(LedgerEntry(name, seconds, self._bytes))

    def progress(self, done: int, total: int, note: str) -> None:
        """``done`` of ``total`` bytes of the present phase."""
        self._bytes = done
        self._report(Progress(self._phase, done, total, note))


def build_engine(settings: bytes, report: Report) -> Engine:
    """The engine that ``settings`` (see assembly.settings) describe. Raises AtlasError."""
    return builder(decode_settings(settings))(settings, report, None)


def builder(likely: Settings | None) -> Callable[[bytes, Report, ReadAhead | None], Engine]:
    """``build_engine`` with what it needs of plugins already at hand, given what the disk began to read. Raises PluginError.

    ``likely`` are the settings that it will be called with, if they are known.
    """
    registry = discover_plugins(likely)
    return lambda settings, report, guessed: assemble(decode_settings(settings), registry, report, guessed)


class Built(Struct, frozen=True):
    """A model on a device, before anybody asks it anything. ``close`` gives the device back."""

    machine: Machine
    model: Model
    plan: StepPlan
    tokenizer: Tokenizer
    library: KernelLibrary
    backend: GpuBackend
    runner: Runner | EmbeddingRunner
    limits: Limits
    budget: Budget

    def close(self) -> None:
        """Release graphs and device; safe after a failure."""
        self.runner.close()
        self.backend.close()


def assemble(settings: Settings, registry: Registry, report: Report, guessed: ReadAhead | None = None) -> Engine:
    """A running engine. ``guessed`` is what the disk began to read before anything was known. Raises AtlasError."""
    ledger = Ledger(report)
    return engine_of(build(settings, registry, ledger, guessed, start_folder(settings)), registry, ledger, eager=True)


def engine_of(built: Built, registry: Registry, ledger: Ledger, *, eager: bool = False) -> Engine:
    """The engine over what was built; ``ledger`` timed it. ``eager``: what requests may need is prepared while it is idle."""
    limits = built.limits
    info = Ready(
        limits.max_seq_len, limits.layout.slots, limits.vocab_size, _fingerprint(registry, built), tuple(ledger.entries),
        tuple((term.name, term.nbytes) for term in built.budget.terms), limits.page_tokens if limits.pages else 0,
        min(limits.pages, default=0) * limits.page_tokens, tuple(built.plan.settings.rows(Level.HARDWARE, Level.MODEL)),
        built.model.spec.hidden_size if built.model.pooling is not None else 0,
    )  # fmt: skip
    eos = end_tokens(built.model)
    return Engine(
        runner=built.runner, scheduler=Scheduler(limits), text=built.tokenizer, eos=eos, info=info,
        grammars=Grammars(built.tokenizer, eos, limits.vocab_size), eager=eager,
    )  # fmt: skip


def build(
    settings: Settings, registry: Registry, ledger: Ledger, guessed: ReadAhead | None = None, folder: Path | None = None
) -> Built:
    """Build every part, in the order in which mistakes are cheapest to find, and check it with one step.

    ``folder`` is where starts are kept: what one has found and planned is taken from there, or kept there.

    The driver starts, the vocabulary is read, and the disk begins to read weights, on threads of their own meanwhile.
    """
    with kept_waiting(), ExitStack() as files, ExitStack() as undo, Aside() as aside, ExitStack() as awake:
        if guessed is not None:
            files.callback(guessed.close)
        begun = starts.Begun(registry, settings, time.time_ns())
        kept = starts.find(folder, begun) if folder else None
        with ledger.phase("kept start" if kept else "resolve"):
            machine = kept.machine() if kept else choose_machine(registry, settings.hardware)
            waking = aside.start(partial(wake, machine)) if machine.declaration.wake else None
            if waking:
                awake.callback(_let_go, waking)

            def opening(library: KernelLibrary, path: Path) -> tuple[GpuBackend, KernelLibrary]:
                backend = open_backend(machine, library, settled(settings, machine))
                undo.callback(backend.close)
                forewarn(backend, path, settings)
                return backend, library

            opened = None
            if kept and not waking:  # opening it takes no time, and memory gets ready while all else is taken
                opened = opening(kept.library(machine), Path(settings.model or "").expanduser())
            model = kept.model() if kept else open_model(registry, settings, ledger.progress)
            files.callback(model.checkpoint.close)
            ahead = aside.start(partial(begin_reading, model, settings, guessed))
            files.callback(_close, ahead)
            if not opened and not waking:  # or while the step is planned
                opened = opening(library_of(machine, model), model.checkpoint.path)
            plan = kept.plan(machine, model) if kept else make_plan(model, machine, settings)
        vocabulary = Vocabulary(aside, model)
        if waking:
            vocabulary.begin()
        with ledger.phase("device"):
            if waking:
                waking.result()
            if opened is None:
                library = kept.library(machine) if kept else library_of(machine, model)
                opened = open_backend(machine, library, plan.settings), library
                undo.callback(opened[0].close)
            backend, library = opened
            awake.close()
            found = backend.facts().processors
            processors = kept.processors if kept else machine.processors
            if found != (processors or found):
                kept, processors = None, found
                plan = make_plan(model, machine, settings, found)
            audit(plan, library)
        packed = partial(_packed, registry, library, model, plan.settings)

        def progress(done: int, total: int, note: str) -> None:
            vocabulary.check()
            ledger.progress(done, total, note)

        runner, limits, budget = _run_up(backend, plan, model, ledger, packed, ahead, progress, vocabulary.begin)
        with ledger.phase("preflight"):
            preflight(runner, limits)
        with ledger.phase("vocabulary"):
            tokenizer = vocabulary.result()
        undo.pop_all()
    if folder and not kept:
        starts.keep_aside(folder, begun, starts.Made(machine, model, plan, processors, library))
    return Built(machine, model, plan, tokenizer, library, backend, runner, limits, budget)


def forewarn(backend: GpuBackend, path: Path, settings: Settings) -> None:
    """Say how much memory the weights at ``path`` will most likely take, where a backend has a use for that: as much as their files do."""
    if isinstance(backend, Forewarned) and settings.load_format == "auto" and settings.transcode == "none":
        with suppress(OSError):  # whoever reads the files says what is wrong
            backend.expect(sum(file.stat().st_size for file in large_files(path)))


def wake(machine: Machine) -> Callable[[], None]:
    """Have the machine's driver started, as its plugin knows how; what is returned ends that, once a backend is open.

    A driver that cannot be started is left to the opening of the backend, which says so.
    """
    try:
        undo: Callable[[], None] = load(machine.declaration.wake, machine.dist)()
    except DeviceError:
        return lambda: None
    return undo


def _close(ahead: "Future[ReadAhead]") -> None:
    if ahead.exception() is None:
        ahead.result().close()


def _let_go(waking: "Future[Callable[[], None]]") -> None:
    waking.result()()


class Vocabulary:
    """The tokenizer of a model, read on a thread of its own while the start waits for something."""

    def __init__(self, aside: Aside, model: Model) -> None:
        self._aside, self._model = aside, model
        self._reading: Future[Tokenizer] | None = None

    def begin(self) -> None:
        """Read it now. Not earlier than need be: other threads of Python would wait for this one. Safe to call twice."""
        if self._reading is None:
            self._reading = self._aside.start(self._read)

    def check(self) -> None:
        """Raise what is known to be wrong with it: a model without a tokenizer need not be loaded to its end."""
        if self._reading is not None and self._reading.done():
            self._reading.result()

    def result(self) -> Tokenizer:
        """Wait for it. Raises CheckpointError."""
        self.begin()
        assert self._reading is not None
        return self._reading.result()

    def _read(self) -> Tokenizer:
        return Tokenizer(self._model.checkpoint.tokenizer(), lazy=True)


def library_of(machine: Machine, model: Model) -> KernelLibrary:
    """The kernels of the target that machine and model make."""
    return KernelLibrary(
        machine.tree, machine.places, Target(machine.name, machine.arch, model.family, model.format_name)
    )


def open_backend(machine: Machine, library: KernelLibrary, settings: Settings) -> GpuBackend:
    """The device, current for this thread, with these kernels."""
    options = {} if settings.threads is None else {"threads": settings.threads}
    backend: GpuBackend = load(machine.declaration.backend, machine.dist)(library, 0, **options)
    backend.bind_to_thread()
    return backend


def audit(plan: StepPlan, library: KernelLibrary) -> None:
    """Find every kernel that the plan may launch. Raises KernelError listing all that are missing, not just the first."""
    reasons: dict[tuple[str, str], dict[str, set[str]]] = {}  # by module and reason, who asks for which of its entries
    cure = ""
    for bucket in plan.buckets:
        for segment in bucket.segments:
            for step in segment.steps:
                for module, entry in step.implementation.kernels:
                    try:
                        library.find(module, entry)
                    except KernelError as error:
                        cure = error.cure
                        reasons.setdefault((module, error.why), {}).setdefault(entry, set()).add(step.need.op)
    if not reasons:
        return
    count = sum(map(len, reasons.values()))
    lines = [f"module {module} ({_entries(asked)}): {why}" for (module, why), asked in reasons.items()]
    raise KernelError(f"{count} kernels of the plan cannot be used on {library.target}", "\n        ".join(lines), cure)


def _entries(asked: Mapping[str, set[str]]) -> str:
    """Entries of one module, with the ops that need them where the name does not tell."""
    return ", ".join(
        entry if ops == {entry} else f"{entry} for {', '.join(sorted(ops))}" for entry, ops in sorted(asked.items())
    )


def _packed(
    registry: Registry, library: KernelLibrary, model: Model, settings: Settings, weights: Weights
) -> PackedCache | None:
    """Where packed weights are kept from start to start; None unless the operator asked for that."""
    if settings.packed_cache is None:
        return None
    if settings.load_format == "dummy":
        raise UsageError(
            "--packed-cache keeps the weights of checkpoints",
            "--load-format dummy makes its weights up",
            "leave one of them out",
        )
    folder = Path(settings.packed_cache).expanduser()
    return PackedCache.of(
        folder, model.checkpoint, weights.copies, str(library.target), registry.identity(), library.digest()
    )


def _run_up(
    backend: GpuBackend, plan: StepPlan, model: Model, ledger: Ledger, packed: Callable[[Weights], PackedCache | None],
    ahead: "Future[ReadAhead]", progress: Callable[[int, int, str], None], waits: Callable[[], None],
) -> tuple[Runner | EmbeddingRunner, Limits, Budget]:  # fmt: skip
    """Budget, weights and graphs. Where weights come by themselves, graphs are made meanwhile.

    ``waits`` is called when there is nothing left to be done but to wait for weights.
    """
    stream = backend.create_stream()
    weights = Weights.of(plan, model)
    free, total = backend.memory()
    bucketed = backend.capabilities.bucketed
    # A step that fetches and delivers by itself is captured in halves and whole.
    captures = 1 + backend.capabilities.host_link if bucketed else 0
    shared = backend.capabilities.unified_memory
    budget = plan_memory(plan, model, weights, free, total, graphs=captures, shared=shared)
    pages = (budget.pages,) * len(plan.layout.slots.table_blocks)
    limits = make_limits(model, plan.settings, plan.layout, budget.max_seq_len, pages, plan.program)
    cache = packed(weights)
    with ExitStack() as unfinished:
        with ledger.phase("weights"):
            loading = begin_loading(backend, model, weights, budget, progress, cache, ahead.result())
            unfinished.callback(loading.stop)
            if cache or not loading.beside:
                waits()
                loading.finish(progress)
            memory, inputs, states = allocate(backend, stream, plan, weights, budget, loading.memory.buffers)
        if cache and cache.reason:
            with ledger.phase(f"packed image, since {cache.reason}"):
                cache.keep(backend, loading.memory, weights.copies, ledger.progress)
        before, _ = backend.memory()
        with ledger.phase("graphs"):
            if model.pooling is not None:
                runner: Runner | EmbeddingRunner = _embedding(
                    backend, stream, plan, model.pooling, memory, inputs, states
                )
            else:
                runner = _generating(backend, stream, plan, model.spec.vocab_size, memory, inputs, states)
        if bucketed:
            budget = with_graphs(budget, max(0, before - backend.memory()[0]))
        if loading.beside:
            waits()
            with ledger.phase("weights"):
                loading.finish(progress)
    return runner, limits, budget


def _generating(
    backend: GpuBackend, stream: Stream, plan: StepPlan, vocab_size: int, memory: StepMemory, inputs: int,
    states: Mapping[str, Buffer],
) -> Runner:  # fmt: skip
    steps = []
    results = Results.of(value.name for value in plan.program.results)
    rings = Rings(backend, [planned.bucket for planned in plan.buckets], states["mask"], vocab_size)
    for planned in plan.buckets:
        local = with_inputs(memory, InputLayout(planned.bucket), inputs)
        frame = rings.frame(inputs, planned.bucket, results)
        steps.append((planned.bucket, bind_step(backend, planned.segments, planned.arena, local, stream, frame)))
    return Runner(
        backend, stream, steps, inputs=inputs, states=states, vocab_size=vocab_size, results=results, rings=rings
    )


def _embedding(
    backend: GpuBackend, stream: Stream, plan: StepPlan, pooling: Pooling, memory: StepMemory, inputs: int,
    states: Mapping[str, Buffer],
) -> EmbeddingRunner:  # fmt: skip
    steps = []
    for planned in plan.buckets:
        local = with_inputs(memory, InputLayout(planned.bucket), inputs)
        steps.append((planned.bucket, bind_step(backend, planned.segments, planned.arena, local, stream)))
    (hidden,) = plan.program.results
    return EmbeddingRunner(
        backend, stream, steps, inputs=inputs, slots=states["slots"], layout=plan.layout.slots, hidden=hidden, pooling=pooling.kind,
    )  # fmt: skip


def preflight(runner: Runner | EmbeddingRunner, limits: Limits) -> None:
    """One step of a few tokens. Raises DeviceError unless its logits, or its vector, are finite and differ from one another.

    Logits that are all alike are what a missing or wrongly read head gives.
    """
    scheduler = Scheduler(limits)
    length = min(_PREFLIGHT_TOKENS, limits.max_seq_len - 1)
    prompt = tuple(token % limits.vocab_size for token in range(1, length + 1))
    scheduler.submit(Generate("preflight", prompt, SamplingParams(temperature=0.0, max_tokens=1)), seed=0, stop_ids=())
    plan = scheduler.schedule()
    assert plan is not None
    if isinstance(runner, EmbeddingRunner):
        logits = np.frombuffer(b"".join(runner.launch(plan).vectors or ()), "<f4")
    else:
        ticket = runner.launch(plan)
        logits = runner.read_logits(ticket)
        runner.collect(ticket)
    if not np.isfinite(logits).all() or float(logits.max()) == float(logits.min()):
        raise DeviceError(
            "the model's first results are useless",
            "some are not finite" if not np.isfinite(logits).all() else "they are all equal",
            "check the checkpoint with another engine; atlas kernels test checks the kernels",
        )


def end_tokens(model: Model) -> tuple[int, ...]:
    """Tokens that end a turn: those of config.json and those of generation_config.json."""
    more = token_ids(model.checkpoint.generation_config.get("eos_token_id"))
    return tuple(dict.fromkeys((*model.spec.eos_token_ids, *more)))


def _fingerprint(registry: Registry, built: Built) -> str:
    """Twelve hex digits over whatever may change the text: plugins, binaries, weights' storage, choices."""
    plan = built.plan
    parts: list[Any] = [registry.identity(), built.library.digest(), plan.settings.model, plan.settings.numerics]
    parts += [sorted((name, layout.name) for name, layout in plan.weights.items())]
    parts += [(key, packed.name) for key, packed in plan.choices.packings.items()]
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
