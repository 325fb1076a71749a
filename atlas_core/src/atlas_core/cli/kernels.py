"""``atlas kernels``: what the tree holds, what is wrong with it, and making and proving its binaries."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from atlas_core.assembly.environment import discover_plugins
from atlas_core.contracts.compute_target import ComputeTarget
from atlas_core.kernels.build import Builder, Built, Selection, jobs
from atlas_core.kernels.library import KernelLibrary, compiled_archs
from atlas_core.kernels.lint import lint as find_faults
from atlas_core.kernels.scan import Places, scan
from atlas_core.kernels.tree import COMMON, KernelTree, Unit
from atlas_core.plugins import Registry, load
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.target import Target

_Command = Callable[..., Any]


def toolchains(registry: Registry) -> dict[str, ComputeTarget]:
    """Every installed toolchain, by vendor."""
    targets = registry.compute_targets
    return {vendor: load(decl.target, targets.owner(vendor).dist)() for vendor, decl in targets.items()}


@click.group("kernels")
def group() -> None:
    """List, build and test kernels."""


def _selection(command: _Command) -> _Command:
    command = click.option(
        "--quant", envvar="ATLAS_TARGET_QUANT", default="*", show_default=True, help="Quantisation of the leaves."
    )(command)
    command = click.option(
        "--model", envvar="ATLAS_TARGET_MODEL", default="*", show_default=True, help="Model of the leaves."
    )(command)
    return click.option(
        "--hw", "hardware", envvar="ATLAS_TARGET_HW", default="*", show_default=True, help="Hardware; * and ? match."
    )(command)


def _warn(tree: KernelTree) -> None:
    for finding in tree.lost():
        click.echo(f"warning: {finding}", err=True)


@group.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_kernels(as_json: bool) -> None:
    """List every module of every target: its entries, whose source it is, and for which architectures it is built."""
    tree, places = scan(discover_plugins().kernel_roots())
    _warn(tree)
    rows = [row for hardware in sorted(tree.hardware) for row in _rows(tree, places, hardware)]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        click.echo(f"{row['hardware']}/{row['layer']}  {row['module']}  {', '.join(row['entries'])}")
        click.echo(f"    from {row['origin']}; {row['state']}")
    for folder in tree.dormant:
        click.echo(f"{folder.id}: dormant, no installed plugin brings the hardware {folder.hardware!r}")
    if not rows and not tree.dormant:
        click.echo("No installed plugin brings kernels.")


def _rows(tree: KernelTree, places: Places, hardware: str) -> list[dict[str, Any]]:
    if tree.hardware[hardware].manifest.abstract:
        return [_row(unit, "inherited by others") for unit in tree.units(hardware)]
    archs = compiled_archs(tree, places, hardware)
    rows = []
    for layer in (
        COMMON,
        *(f"{model}/{quant}" for machine, model, quant in sorted(tree.leaves) if machine == hardware),
    ):
        model, _, quant = layer.partition("/") if layer != COMMON else ("*", "", "*")
        stale = {arch: KernelLibrary(tree, places, Target(hardware, arch, model, quant)).stale() for arch in archs}
        for unit in tree.units(hardware, layer):
            states = [f"{arch}: {'stale or missing' if unit.module in stale[arch] else 'built'}" for arch in archs]
            rows.append(_row(unit, ", ".join(states) or "not built"))
    return rows


def _row(unit: Unit, state: str) -> dict[str, Any]:
    return {
        "hardware": unit.hardware, "layer": unit.layer, "module": unit.module,
        "source": unit.source, "origin": unit.origin, "defines": dict(unit.defines), "state": state,
        "entries": {entry.name: [str(param) for param in entry.params] for entry in unit.entries},
    }  # fmt: skip


@group.command("lint")
def lint() -> None:
    """Check the whole tree: ownership, declarations, shadows, includes, copies. Needs no compiler."""
    tree, _ = scan(discover_plugins().kernel_roots())
    findings = find_faults(tree)
    for finding in findings:
        click.echo(str(finding))
    if findings:
        raise KernelError(f"{len(findings)} findings in the kernel tree", cure="Correct what is listed above.")
    click.echo(
        f"{len(tree.hardware)} hardware, {len(tree.leaves)} leaves, {len(tree.dormant)} dormant: nothing is wrong"
    )


@group.command("build")
@_selection
@click.option(
    "--arch",
    "archs",
    multiple=True,
    help="Architecture, repeatable; * and ? match. The first that the hardware declares if not given.",
)
@click.option(
    "--jobs",
    "workers",
    type=click.IntRange(min=1),
    default=None,
    help="Compilers at once; one a processor if not given.",
)
@click.option("--skip-build", envvar="ATLAS_SKIP_BUILD", is_flag=True, help="Do nothing, and say so.")
@click.option("-v", "--verbose", is_flag=True, help="Name what was up to date as well.")
def build(
    hardware: str, model: str, quant: str, archs: Sequence[str], workers: int | None, skip_build: bool, verbose: bool
) -> None:
    """Compile what is stale. A second run compiles nothing; no GPU is needed."""
    if skip_build:
        click.echo("kernels: not built, as ATLAS_SKIP_BUILD or --skip-build says")
        return
    registry = discover_plugins()
    tree, places = scan(registry.kernel_roots())
    _warn(tree)
    targets = toolchains(registry)
    counts = {"built": 0, "copied": 0, "kept": 0}

    def tell(built: Built) -> None:
        counts[built.state] += 1
        if verbose or built.state == "built":
            job = built.job
            click.echo(f"{built.state} {job.hardware}/{job.layer} {job.arch} {built.module}{_resources(built)}")
        if built.log:
            click.echo(built.log, err=True)

    builder = Builder(tree, places, targets, workers or os.cpu_count() or 1, tell)
    for job in jobs(tree, targets, Selection(hardware, model, quant, tuple(archs))):
        builder.build(job)
    copied = f", {counts['copied']} copied from what is extended" if counts["copied"] else ""
    click.echo(f"kernels: {counts['built']} built{copied}, {counts['kept']} up to date")


def _resources(built: Built) -> str:
    known = [
        f"{name} {entry.registers} registers, {entry.spills or 0} B spilled, {entry.shared or 0} B shared"
        for name, entry in sorted(built.record.entries.items()) if entry.registers is not None
    ]  # fmt: skip
    return f": {'; '.join(known)}" if known else ""


def _trial(command: _Command) -> _Command:
    command = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
    command = click.option(
        "--filter", "text", default="",
        help="Only trials whose id OP[implementation](label) contains this; with 'OP[', others are not even prepared.",
    )(command)  # fmt: skip
    return click.option(
        "--hw", "hardware", envvar="ATLAS_TARGET_HW", default="*", show_default=True, help="Hardware; * and ? match."
    )(command)


@group.command("test")
@_trial
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes at once, which share the device.",
)
def test(hardware: str, text: str, as_json: bool, jobs: int) -> int:
    """Hold every kernel against its op's reference, on the device. Exits 1 when one differs or was not tried."""
    if jobs > 1:  # or numpy's libraries in each of these processes would take all processors
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from atlas_core.assembly.trials import test_hardware

    reports = dict(test_hardware(discover_plugins(), hardware, text, lambda result: None, jobs))
    _print_reports(reports, as_json)
    return 0 if all(report.ok for report in reports.values()) else 1


@group.command("bench")
@_trial
def bench(hardware: str, text: str, as_json: bool) -> None:
    """Time every kernel on the device, beside the time that its bytes need at least."""
    from atlas_core.assembly.trials import bench_hardware

    def heard(timing: Any) -> None:
        if not as_json:
            click.echo(str(timing))

    found = dict(bench_hardware(discover_plugins(), hardware, text, heard, time.perf_counter))
    if as_json:
        click.echo(json.dumps({name: [t.as_dict() for t in timings] for name, timings in found.items()}, indent=1))


@group.command("support")
@_trial
def support(hardware: str, text: str, as_json: bool) -> None:
    """Show which implementation takes which trial of which op, and why others refuse. Needs no device."""
    from atlas_core.assembly.trials import support_of_hardware

    _print_reports(dict(support_of_hardware(discover_plugins(), hardware, text)), as_json)


def _print_reports(reports: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({name: report.as_dict() for name, report in reports.items()}, indent=1))
        return
    for name, report in reports.items():
        click.echo(f"{name}\n{report.table()}")
