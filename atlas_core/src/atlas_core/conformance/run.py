"""The three modes of conformance: test, support, bench. Plain objects in, plain results out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import median

import numpy as np
from msgspec import Struct, field

from atlas_core.conformance.codecs import WeightCodec, plain_codecs
from atlas_core.conformance.decoder import CHAIN_SHAPES, LARGE_SHAPES, SHAPES, Recorded, record_decoder
from atlas_core.conformance.execution import Execution
from atlas_core.conformance.fused_trials import fused_trials
from atlas_core.conformance.hybrid_decoder import HYBRID_SHAPES, record_hybrid_decoder
from atlas_core.conformance.linear_decoder import LARGE_LINEAR_SHAPES, LINEAR_SHAPES, record_linear_decoder
from atlas_core.conformance.results import Report, Result, Status, Timing, result_id
from atlas_core.conformance.variant import Variant, live_shape, variants, with_caches
from atlas_core.contracts.backend import GpuBackend
from atlas_core.contracts.ops import FusedOp, OpImplementation
from atlas_core.ops.arrays import floating
from atlas_core.ops.cases import GENERATORS, trials
from atlas_core.ops.contract import Op
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.trials import Trial
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import AtlasError, DeviceError
from atlas_core.vocab.verdict import Verdict

MoreTrials = Mapping[str, Callable[[int, bool], Iterator[Trial]]]
"""(seed, large) → trials, by the name of an op that a plugin brings."""


class Subject(Struct, frozen=True):
    """What is on trial. ``models`` are further recorded programs in which fused ops find their patterns."""

    backend: GpuBackend
    implementations: Sequence[OpImplementation]
    arch: str
    numerics: str = "exact"
    fused: Sequence[FusedOp] = ()
    ops: Mapping[str, Op] = field(default_factory=lambda: PRIMITIVES)
    models: Sequence[Recorded] = ()
    trials: MoreTrials = field(default_factory=dict)

    @property
    def processors(self) -> int:
        """The device's."""
        return self.backend.facts().processors


class Options(Struct, frozen=True):
    """Which trials are run: those whose id contains ``filter``, in these activation types and weight layouts."""

    filter: str = ""
    activations: Sequence[DType] = (DType.F32, DType.BF16, DType.F16)
    codecs: Sequence[WeightCodec] = field(default_factory=plain_codecs)
    seed: int = 0


OnResult = Callable[[Result], None]
_RUN_US = 20_000.0
"""How long one run of a bench lasts at least, microseconds, unless it reaches its number of replays before."""


def test(  # the verb of the command line, no test of pytest's
    subject: Subject,
    options: Options | None = None,  # noqa: PT028
    on_result: OnResult | None = None,  # noqa: PT028
    on_begin: OnResult | None = None,  # noqa: PT028
) -> Report:
    """Run every trial that an implementation supports.

    ``on_result`` hears each result as it comes, ``on_begin`` before each trial runs (a Result with status "begun"). A lost
    device ends the run; the report says so.
    """
    options = options or Options()
    report = Report(missing=_without_trials(subject, options))
    for implementation, variant, verdict in _questions(subject, options, large=False):
        if on_begin and verdict.ok:
            on_begin(_result(implementation, variant, "begun", ""))
        try:
            result = _tested(subject, implementation, variant, verdict)
        except DeviceError as error:
            result = _result(implementation, variant, "failed", str(error))
            if error.sticky:
                report.lost = f"the device was lost at {result.id}; what follows was not run"
        report.results.append(result)
        if on_result:
            on_result(result)
        if report.lost:
            break
    return report


def support(subject: Subject, options: Options | None = None) -> Report:
    """Ask without running: every trial is "passed" (supported) or "unsupported" with the reasons. Needs no working device."""
    options = options or Options()
    report = Report(missing=_without_trials(subject, options))
    for implementation, variant, verdict in _questions(subject, options, large=False):
        status: Status = "passed" if verdict.ok else "unsupported"
        report.results.append(_result(implementation, variant, status, ", ".join(verdict.reasons)))
    return report


def bench(
    subject: Subject, options: Options | None = None, *, bandwidth: float | None = None,
    clock: Callable[[], float] | None = None, replays: int = 50, on_timing: Callable[[Timing], None] | None = None,
) -> list[Timing]:  # fmt: skip
    """Time large trials: the median over five runs of up to ``replays`` graph launches each, fewer when they take long.

    Timing events are used where the backend has them, else ``clock`` (seconds) around a synchronisation. ``bandwidth`` is the
    machine's, bytes a second. Small operands stay in caches between replays, so that shares above 100 % are possible for them.
    Raises DeviceError when there is neither kind of clock.
    """
    options = options or Options()
    if clock is None and not subject.backend.capabilities.event_timing:
        raise DeviceError("nothing can be timed", "the backend has no timing events and no clock was given")
    timings = []
    for implementation, variant, verdict in _questions(subject, options, large=True):
        if not verdict.ok:
            continue
        timing = _timed(subject, implementation, variant, bandwidth, clock, replays)
        timings.append(timing)
        if on_timing:
            on_timing(timing)
    return timings


def _questions(
    subject: Subject, options: Options, *, large: bool
) -> Iterator[tuple[OpImplementation, Variant, Verdict]]:
    """Every implementation with every variant of every trial of its op, and whether it takes it."""
    by_op: dict[str, list[OpImplementation]] = {}
    for implementation in subject.implementations:
        by_op.setdefault(implementation.op, []).append(implementation)
    for name, implementations in sorted(by_op.items()):
        if not _wanted(options.filter, name):
            continue
        for op, trial in _op_trials(subject, name, options.seed, large=large):
            for variant in variants(op, trial, options.activations, options.codecs):
                for implementation in implementations:
                    for chosen, verdict in _asked(subject, implementation, variant):
                        if options.filter in result_id(name, implementation.name, chosen.label):
                            yield implementation, chosen, verdict


def _asked(subject: Subject, implementation: OpImplementation, variant: Variant) -> Iterator[tuple[Variant, Verdict]]:
    try:
        chosen = with_caches(variant, implementation, subject.arch, subject.numerics)
    except ValueError as error:  # a row is no whole number of blocks: nobody can store such a weight
        yield variant, Verdict.no(str(error))
        return
    if not chosen:
        yield (
            variant,
            Verdict.no(f"offers no cache layout with pages of {variant.trial.first.attrs.get('page_tokens')} tokens"),
        )
    for one in chosen:
        try:
            yield one, implementation.supports(one.need(subject.arch, subject.numerics, subject.processors))
        except ValueError as error:
            yield one, Verdict.no(str(error))


def _wanted(text: str, op: str) -> bool:
    """Whether an id of this op could contain the filter; avoids generating trials in vain."""
    head, bracket, _ = text.partition("[")
    return not bracket or op.endswith(head)


def _op_trials(subject: Subject, name: str, seed: int, *, large: bool) -> Iterator[tuple[Op, Trial]]:
    for fused in subject.fused:
        if fused.name == name:
            shapes, linear = (LARGE_SHAPES, LARGE_LINEAR_SHAPES) if large else (SHAPES, LINEAR_SHAPES)
            chains = CHAIN_SHAPES if fused.carried and not large else ()
            models = chain(
                (record_decoder(shape) for shape in (*shapes, *chains)),
                (record_linear_decoder(shape) for shape in linear),
                (record_hybrid_decoder(shape) for shape in (HYBRID_SHAPES if fused.carried else ())),
                () if large else subject.models,
            )
            return fused_trials(fused, subject.ops, list(models), seed, large=large)
    if name in subject.trials:
        return ((subject.ops[name], trial) for trial in subject.trials[name](seed, large))
    if name in GENERATORS:
        return ((subject.ops[name], trial) for trial in trials(name, seed, large=large))
    return iter(())


def _without_trials(subject: Subject, options: Options) -> list[str]:
    """Ops that are implemented and for which nothing can be tried."""
    names = sorted({implementation.op for implementation in subject.implementations})
    return [
        name
        for name in names
        if _wanted(options.filter, name) and next(_op_trials(subject, name, options.seed, large=False), None) is None
    ]


def _tested(subject: Subject, implementation: OpImplementation, variant: Variant, verdict: Verdict) -> Result:
    if not verdict.ok:
        return _result(implementation, variant, "unsupported", ", ".join(verdict.reasons))
    try:
        with Execution(
            subject.backend, implementation, variant, variant.need(subject.arch, subject.numerics, subject.processors)
        ) as execution:
            found = execution.verify()
    except DeviceError:
        raise
    except AtlasError as error:
        return _result(implementation, variant, "failed", str(error))
    except Exception as error:  # noqa: BLE001 a plugin's own fault is a finding about it, and the next trial must run
        return _result(implementation, variant, "failed", f"{type(error).__name__}: {error}")
    return _result(implementation, variant, "failed" if found else "passed", "\n       ".join(found))


def _timed(
    subject: Subject, implementation: OpImplementation, variant: Variant, bandwidth: float | None,
    clock: Callable[[], float] | None, replays: int,
) -> Timing:  # fmt: skip
    backend = subject.backend
    with Execution(
        backend, implementation, variant, variant.need(subject.arch, subject.numerics, subject.processors)
    ) as execution:

        def measured(times: int) -> float:
            """Microseconds of one replay, from ``times`` of them."""
            if clock is None or backend.capabilities.event_timing:
                start, end = execution.events()
                backend.record_event(start, execution.stream)
                execution.replay(times)
                backend.record_event(end, execution.stream)
                backend.wait_event(end)
                return backend.elapsed_us(start, end) / times
            began = clock()
            execution.replay(times)
            backend.synchronize(execution.stream)
            return (clock() - began) * 1e6 / times

        measured(1)  # the first replay pays for what is lazy
        times = max(1, min(replays, int(_RUN_US / max(measured(1), 1e-3))))
        microseconds = median(measured(times) for _ in range(5))
        nbytes = _traffic(execution, variant)
        case = variant.trial.first
        shapes = {operand.name: live_shape(case, operand.name) for operand in variant.op.operands}
        flops = variant.op.flops(shapes, case.attrs)
        share = nbytes / microseconds * 1e6 / bandwidth if bandwidth else None
        label = result_id(variant.op.name, implementation.name, variant.label)
        return Timing(label, execution.launches, microseconds, nbytes, flops, share)


def _traffic(execution: Execution, variant: Variant) -> int:
    """Bytes that must cross memory at least once.

    Live activations, the pages in use, states of live sequences there and back, weights, but of tables and experts only those
    that somebody looks up.
    """
    case = variant.trial.first
    total = 0
    for operand in variant.op.operands:
        nbytes = execution.buffers()[operand.name].nbytes
        shape = live_shape(case, operand.name)
        recurrent = operand.kind == "state" and floating(variant.dtype(operand))
        if operand.kind in ("input", "state") and not recurrent:
            continue
        if recurrent:
            nbytes = nbytes // (shape[0] * shape[1]) * 2 * case.sequences
        elif operand.kind == "activation":
            elements = 1
            for extent in shape:
                elements *= extent
            nbytes = elements * variant.dtype(operand).itemsize
        elif operand.kind == "cache" and operand.role == "inout":
            nbytes = case.tokens * 2 * shape[2] * shape[4] * variant.dtype(operand).itemsize
        elif operand.kind == "cache":
            nbytes //= shape[0]
        elif variant.op.name == "embed":
            nbytes = nbytes // shape[0] * case.tokens
        elif variant.op.name == "moe_experts":
            nbytes = nbytes // shape[0] * len(np.unique(case.arrays["experts"]))
        total += nbytes
    return total


def _result(implementation: OpImplementation, variant: Variant, status: Status, detail: str) -> Result:
    return Result(variant.op.name, implementation.name, variant.label, status, detail)
