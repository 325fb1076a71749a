"""Conformance of installed hardware: from names to what is put on trial."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from typing import cast

from msgspec.structs import replace

from atlas_core.assembly.machine import Machine, choose_machine, kernel_tree
from atlas_core.assembly.plan import settled
from atlas_core.assembly.trial_process import Tell, report_of
from atlas_core.conformance import run
from atlas_core.conformance.backends import CHECKS, test_backend
from atlas_core.conformance.codecs import WeightCodec, codecs_of, plain_codecs
from atlas_core.conformance.results import Report, Result, Timing, joined
from atlas_core.contracts.backend import GpuBackend
from atlas_core.kernels.library import KernelLibrary
from atlas_core.plugins import Registry
from atlas_core.plugins.load import load
from atlas_core.plugins.probe import Prober
from atlas_core.runtime.null import NullBackend
from atlas_core.settings import Settings
from atlas_core.vocab.errors import ResolveError
from atlas_core.vocab.target import Target

BYTES_PER_GB = 1e9


def test_hardware(
    registry: Registry, hardware: str, text: str, heard: Callable[[Result], None], jobs: int
) -> Iterator[tuple[str, Report]]:
    """The report of every hardware that matches and is present. Raises ResolveError when none is.

    Each runs in ``jobs`` processes of its own, between which its implementations are shared out: a kernel that takes one down is named by
    the report. ``heard`` is called on as many threads.
    """
    for machine in _present(registry, hardware):
        with ThreadPoolExecutor(jobs) as pool:
            parts = [partial(_test, registry, machine.name, text, part, jobs) for part in range(jobs)]
            yield machine.name, joined(pool.map(lambda work: report_of(work, heard), parts))


def _test(registry: Registry, hardware: str, text: str, part: int, parts: int, tell: Tell) -> None:
    """In a process of the trials, of which there are ``parts``; the first one tries the backend as well."""
    machine = choose_machine(registry, hardware)
    # Neighbours in this order are of one op and cost alike, so that nobody gets all that are long.
    own = tuple(sorted(machine.implementations, key=lambda implementation: implementation.op)[part::parts])
    share = replace(machine.brought(), implementations=own)
    machine = replace(machine, brought=lambda: share)
    backend = _open(machine)
    try:
        found = [] if part else _test_backend(backend, text, tell)
        report = run.test(_subject(machine, backend), _options(registry, machine, text), tell, tell)
        report.results[:0] = found
        tell(report)
    finally:
        backend.close()


def _test_backend(backend: GpuBackend, text: str, tell: Tell) -> list[Result]:
    """Memory, copies, streams and graphs come first: where they are wrong, nothing else can be right."""
    name = backend.facts().name
    results = []
    for label, check in CHECKS.items():
        if text in (begun := Result("backend", name, label, "begun")).id:
            tell(begun)
            results += test_backend(backend, {label: check}).results
            tell(results[-1])
    return results


def bench_hardware(
    registry: Registry, hardware: str, text: str, heard: Callable[[Timing], None], clock: Callable[[], float]
) -> Iterator[tuple[str, list[Timing]]]:
    """Timings of every hardware that matches and is present; ``clock`` in seconds serves where the device keeps no time."""
    for machine in _present(registry, hardware):
        backend = _open(machine)
        gbps = machine.chain[0].memory_bandwidth_gbps
        try:
            timings = run.bench(
                _subject(machine, backend), _options(registry, machine, text),
                bandwidth=gbps * BYTES_PER_GB if gbps else None, clock=clock, on_timing=heard,
            )  # fmt: skip
            yield machine.name, timings
        finally:
            backend.close()


def support_of_hardware(registry: Registry, hardware: str, text: str) -> Iterator[tuple[str, Report]]:
    """What every hardware that matches would take. Needs no device."""
    for name in _matching(registry, hardware):
        machine = choose_machine(registry, name)
        yield (
            machine.name,
            run.support(_subject(machine, cast("GpuBackend", NullBackend())), _options(registry, machine, text)),
        )


def _matching(registry: Registry, hardware: str) -> list[str]:
    """Real machines of that name or pattern; one whose folder is broken is an error only when it is named."""
    tree = kernel_tree(registry)[0]
    if hardware in registry.hardware:
        tree.require(hardware)
    names = [name for name in sorted(registry.hardware) if name in tree.hardware and fnmatchcase(name, hardware)]
    return [name for name in names if not tree.hardware[name].manifest.abstract]


def _present(registry: Registry, hardware: str) -> list[Machine]:
    prober = Prober()
    reasons, present = [], []
    for name in _matching(registry, hardware):
        verdict = prober.probe(registry.hardware[name].probe, registry.hardware.owner(name).dist)
        if verdict.ok:
            present.append(choose_machine(registry, name))
        else:
            reasons.append(f"{name}: {', '.join(verdict.reasons)}")
    if not present:
        raise ResolveError(
            f"no hardware that matches {hardware!r} is here",
            "; ".join(reasons) or "none is installed",
            "atlas plugins list",
        )
    return present


def _open(machine: Machine) -> GpuBackend:
    library = KernelLibrary(machine.tree, machine.places, Target(machine.name, machine.arch))
    backend: GpuBackend = load(machine.declaration.backend, machine.dist)(library, 0)
    backend.bind_to_thread()
    return backend


def _subject(machine: Machine, backend: GpuBackend) -> run.Subject:
    numerics = settled(Settings(), machine).numerics
    return run.Subject(backend, machine.implementations, machine.arch, numerics, machine.fused)


def _options(registry: Registry, machine: Machine, text: str) -> run.Options:
    codecs: tuple[WeightCodec, ...] = plain_codecs()
    for name, declaration in sorted(registry.quant_formats.items()):
        if declaration.weights and name != "plain":
            codecs += codecs_of(load(declaration.weights, registry.quant_formats.owner(name).dist)())
    return run.Options(text, codecs=codecs)
