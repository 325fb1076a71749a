"""Compiling what is stale. The one place that starts compilers; nothing here runs while a model is served."""

import fcntl
import fnmatch
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.contracts.compute_target import Compiler, CompileReport, ComputeTarget
from atlas_core.kernels.closure import closure, content_key, source_key
from atlas_core.kernels.prototypes import prototype_header
from atlas_core.kernels.record import MANIFEST, CompiledEntry, CompiledLayer, CompiledModule, dump, load
from atlas_core.kernels.scan import Places
from atlas_core.kernels.tree import COMMON, Hardware, KernelTree, Unit
from atlas_core.vocab.errors import KernelError


class Selection(Struct, frozen=True):
    """Shell-style wildcards. A selected hardware brings its common layer.

    No ``archs`` means the first that the hardware declares, ``("*",)`` all of them.
    """

    hardware: str = "*"
    model: str = "*"
    quant: str = "*"
    archs: tuple[str, ...] = ()


class Job(Struct, frozen=True):
    """One output folder: a layer of a hardware for one (resolved) architecture."""

    hardware: str
    arch: str
    layer: str


class Built(Struct, frozen=True):
    """What became of one module: ``built``, ``kept``, or ``copied`` from a hardware that is extended.

    ``log`` is what the compiler said beside errors.
    """

    job: Job
    module: str
    state: str
    record: CompiledModule
    log: str = ""


Progress = Callable[[Built], None]


def jobs(tree: KernelTree, targets: Mapping[str, ComputeTarget], selection: Selection) -> tuple[Job, ...]:
    """The output folders that a selection means.

    Raises KernelError when nothing matches, when what matches is broken, or when nobody offers the toolchain.
    """
    found: list[Job] = []
    for machine in _machines(tree, selection.hardware):
        name, declared = machine.manifest.name, machine.manifest.archs
        tree.refuse_findings(folder=name)
        target = _target(targets, machine.manifest.vendor)
        leaves = [
            f"{model}/{quant}"
            for hardware, model, quant in sorted(tree.leaves)
            if hardware == name and _matches(model, selection.model) and _matches(quant, selection.quant)
        ]
        for arch in _archs(name, declared, selection.archs):
            resolved = target.resolve_arch(arch)
            found += [Job(name, resolved, layer) for layer in (COMMON, *leaves)]
    return tuple(dict.fromkeys(found))


def _machines(tree: KernelTree, pattern: str) -> list[Hardware]:
    real = {name: machine for name, machine in sorted(tree.hardware.items()) if not machine.manifest.abstract}
    found = [machine for name, machine in real.items() if _matches(name, pattern)]
    if not found:
        known = f"Known: {', '.join(real) or 'none'}."
        raise KernelError(f"No hardware matches {pattern!r}", known, "Correct --hw or install the plugin.")
    return found


def _archs(name: str, declared: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        if not any(_matches(arch, pattern) for arch in declared):
            known = f"Declared: {', '.join(declared)}."
            raise KernelError(f"{name} has no architecture {pattern!r}", known, "Correct --arch.")
    return tuple(arch for arch in declared if any(_matches(arch, pattern) for pattern in patterns or declared[:1]))


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def _target(targets: Mapping[str, ComputeTarget], vendor: str) -> ComputeTarget:
    if vendor not in targets:
        raise KernelError(
            f"Nobody offers a toolchain for {vendor!r}",
            f"Known: {', '.join(sorted(targets)) or 'none'}.",
            "Install the plugin with that vendor's ComputeTarget.",
        )
    return targets[vendor]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(content)
    Path(temporary).chmod(0o644)
    Path(temporary).replace(path)


class Builder:
    """Builds jobs one after the other, with up to ``workers`` compilers at once inside each."""

    def __init__(
        self,
        tree: KernelTree,
        places: Places,
        targets: Mapping[str, ComputeTarget],
        workers: int = 1,
        progress: Progress = lambda built: None,
    ) -> None:
        self._tree = tree
        self._places = places
        self._targets = targets
        self._workers = workers
        self._progress = progress
        self._compilers: dict[str, Compiler] = {}

    def build(self, job: Job) -> tuple[Built, ...]:
        """Bring one output folder up to date; a second call compiles nothing.

        Every finished binary is recorded, whatever happens to the others. Raises the first KernelError: the tree is
        broken, a compiler is missing or refuses, an entry is missing or undeclared, a kernel spills too much, or the
        folder cannot be written.
        """
        vendor = self._tree.require(job.hardware).manifest.vendor
        target = _target(self._targets, vendor)
        units = self._tree.units(job.hardware, job.layer)
        packages = {path.partition(":")[0] for unit in units for path in (unit.package, *unit.includes)}
        self._tree.refuse_findings(frozenset(packages))
        if vendor not in self._compilers:
            self._compilers[vendor] = target.find_compiler()
        folder = self._places.compiled(self._owner(job), job.hardware, job.arch, job.layer)
        try:
            with _locked(folder):
                return self._build_locked(job, units, target, self._compilers[vendor], folder)
        except OSError as error:
            cure = "Make room, or build as the owner of the package or from a checkout."
            raise KernelError(f"{folder} cannot be written", str(error), cure) from error

    def _owner(self, job: Job) -> str:
        if job.layer == COMMON:
            return self._tree.require(job.hardware).package
        model, _, quant = job.layer.partition("/")
        return self._tree.leaves[job.hardware, model, quant].package

    def _build_locked(
        self, job: Job, units: tuple[Unit, ...], target: ComputeTarget, compiler: Compiler, folder: Path
    ) -> tuple[Built, ...]:
        old = self._present(folder)
        declarations = {
            path: hashlib.sha256(self._tree.read(path) or b"").hexdigest()
            for path in self._tree.declarations(job.hardware, job.layer)
        }
        elders = self._elders(job)
        done: dict[str, Built] = {}
        stale: list[tuple[Unit, dict[str, str], str, str, str]] = []
        for unit in units:
            files = closure(unit.source, unit.includes, self._tree.read)
            header = prototype_header(target, unit.module, unit.entries)
            facts = source_key(unit, files, job.arch)
            key = content_key(facts, header, compiler.version)
            kept = old.get(unit.module)
            if kept is not None and kept.key == key and _digest(folder / kept.file) == kept.sha256:
                done[unit.module] = Built(job, unit.module, "kept", kept)
                self._progress(done[unit.module])
            elif copied := self._copied(elders, unit, key, folder):
                done[unit.module] = Built(job, unit.module, "copied", copied)
                self._progress(done[unit.module])
            else:
                stale.append((unit, files, header, facts, key))
        failure: KernelError | None = None
        with ThreadPoolExecutor(max_workers=max(1, self._workers)) as pool:
            running = [pool.submit(self._compile, target, compiler, job, folder, *item) for item in stale]
            for future in running:
                try:
                    module, record, log = future.result()
                except KernelError as error:
                    failure = failure or error
                    continue
                done[module] = Built(job, module, "built", record, log)
                self._record(job, folder, declarations, done)
                self._progress(done[module])
        self._record(job, folder, declarations, done)
        for name, record in old.items():
            if name not in done:
                (folder / record.file).unlink(missing_ok=True)
        if failure is not None:
            raise failure
        return tuple(done[name] for name in sorted(done))

    def _elders(self, job: Job) -> list[tuple[Path, Mapping[str, CompiledModule]]]:
        """What was built of the hardware that this one extends, nearest first."""
        if job.layer != COMMON:
            return []
        folders = [
            self._places.compiled(machine.package, machine.manifest.name, job.arch, COMMON)
            for machine in self._tree.chain(job.hardware)[1:]
        ]
        return [(folder, self._present(folder)) for folder in folders]

    def _copied(
        self, elders: list[tuple[Path, Mapping[str, CompiledModule]]], unit: Unit, key: str, folder: Path
    ) -> CompiledModule | None:
        """The record of an elder's binary, brought to ``folder``: what it depends on is in its key, and no hardware is."""
        for elder, records in elders:
            record = records.get(unit.module)
            if record is None or record.key != key or not (elder / record.file).is_file():
                continue
            content = (elder / record.file).read_bytes()
            if hashlib.sha256(content).hexdigest() == record.sha256:
                _write(folder / record.file, content)
                return replace(record, origin=unit.origin)
        return None

    def _present(self, folder: Path) -> Mapping[str, CompiledModule]:
        path = folder / MANIFEST
        if not path.exists():
            return {}
        try:
            return load(path.read_text("utf-8"), str(path)).modules
        except KernelError:
            # Of an older Atlas or cut short: everything is built again and the file replaced.
            return {}

    def _record(self, job: Job, folder: Path, declarations: Mapping[str, str], done: Mapping[str, Built]) -> None:
        modules = {name: built.record for name, built in done.items()}
        text = dump(CompiledLayer(job.hardware, job.arch, job.layer, declarations, modules))
        path = folder / MANIFEST
        if not path.exists() or path.read_text("utf-8") != text:
            _write(path, text.encode())

    def _compile(
        self,
        target: ComputeTarget,
        compiler: Compiler,
        job: Job,
        folder: Path,
        unit: Unit,
        files: dict[str, str],
        header: str,
        facts: str,
        key: str,
    ) -> tuple[str, CompiledModule, str]:
        with tempfile.TemporaryDirectory(prefix=f".{unit.module}-", dir=folder) as temporary:
            forced = Path(temporary) / f"{unit.module}.prototypes.h"
            forced.write_text(header, encoding="utf-8")
            name = f"{unit.module}{target.output_extension}"
            output = Path(temporary) / name
            flags = [*unit.flags, *(f"-D{define}={value}" for define, value in unit.defines)]
            includes = [self._places.path(path) for path in unit.includes]
            report = target.compile(compiler, self._places.path(unit.source), output, job.arch, flags, includes, forced)
            _check(unit, report)
            record = CompiledModule(
                name,
                _digest(output),
                unit.source,
                unit.origin,
                facts,
                key,
                compiler.version,
                unit.flags,
                unit.defines,
                files,
                {
                    entry.name: CompiledEntry(
                        entry.params,
                        report.registers.get(entry.name),
                        report.spills.get(entry.name),
                        report.shared.get(entry.name),
                    )
                    for entry in unit.entries
                },
            )
            output.replace(folder / name)
        return unit.module, record, report.log


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _check(unit: Unit, report: CompileReport) -> None:
    """Hold the compiler's report, where it gives one, against the declaration."""
    declared = {entry.name for entry in unit.entries}
    where = f"Module {unit.module} of {unit.hardware}/{unit.layer} ({unit.source})"
    if report.registers and (missing := sorted(declared - report.registers.keys())):
        raise KernelError(
            f"{where} does not offer the entry {missing[0]!r} with the declared parameters",
            "The source defines no such function, or another overload of it.",
            "Make the source and KERNEL.toml agree.",
        )
    if extra := sorted(report.registers.keys() - declared):
        raise KernelError(
            f"{where} offers the undeclared entry {extra[0]!r}", cure="Declare it in KERNEL.toml or remove it."
        )
    for entry, spilled in sorted(report.spills.items()):
        if spilled > unit.max_spill_bytes:
            raise KernelError(
                f"{where}: {entry} spills {spilled} bytes a thread, allowed are {unit.max_spill_bytes}",
                cure="Lower its register use, or state max_spill_bytes with a spill_reason in KERNEL.toml.",
            )
