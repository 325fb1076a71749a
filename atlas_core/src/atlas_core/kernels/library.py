"""The binaries that one target runs: found, or an error that says how to build them. No compiler, no fallback."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from atlas_core.kernels.closure import closure, source_key, unchanged
from atlas_core.kernels.record import MANIFEST, CompiledLayer, load
from atlas_core.kernels.scan import Places
from atlas_core.kernels.tree import COMMON, KernelTree, Unit
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Param
from atlas_core.vocab.target import Target


class CompiledKernel(Struct, frozen=True):
    """One entry, ready to be loaded. ``origin`` says whose source it is.

    ``params`` are what ``GpuBackend.prepare_launch`` holds arguments against; resources are None where the compiler
    does not tell.
    """

    module: str
    entry: str
    path: Path
    sha256: str
    params: tuple[Param, ...]
    origin: str
    registers: int | None
    spills: int | None
    shared: int | None


def build_command(hardware: str, arch: str, layer: str = COMMON) -> str:
    """The command that makes the binaries of a layer."""
    # A native build is named after the machine it was made on; the alias is what a person types.
    command = f"atlas kernels build --hw {hardware} --arch {'native' if arch.startswith('native-') else arch}"
    if layer != COMMON:
        model, _, quant = layer.partition("/")
        command += f" --model {model} --quant {quant}"
    return command


def compiled_archs(tree: KernelTree, places: Places, hardware: str) -> tuple[str, ...]:
    """The architectures for which the common layer of a hardware has been built, sorted; other machines' included."""
    owner = tree.require(hardware).package
    parent = places.compiled(owner, hardware, "any", COMMON).parents[1]
    return tuple(sorted(path.parents[1].name for path in parent.glob(f"*/{COMMON}/{MANIFEST}")))


class KernelLibrary:
    """Lookup for one target: its leaf, else common (which holds what the hardware inherits). Reads no binaries.

    ``target.arch`` is a resolved name, as given by ``ComputeTarget.resolve_arch``.
    """

    def __init__(self, tree: KernelTree, places: Places, target: Target) -> None:
        self.target = target
        self._tree = tree
        self._places = places
        self._layers = tuple(dict.fromkeys((tree.layer(target.hardware, target.model, target.quant), COMMON)))
        self._units: dict[str, dict[str, Unit]] = {}
        self._compiled: dict[str, CompiledLayer | None] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._found: dict[tuple[str, str], CompiledKernel] = {}
        tree.refuse_findings(folder=f"{target.hardware}/{target.model}/{target.quant}")
        for layer in self._layers:
            units = tree.units(target.hardware, layer)
            tree.refuse_findings(
                frozenset(path.partition(":")[0] for unit in units for path in (unit.package, *unit.includes))
            )
            self._units[layer] = {unit.module: unit for unit in units}
            self._compiled[layer] = self._read(layer)

    def find(self, module: str, entry: str, op: str = "") -> CompiledKernel:
        """The compiled entry. Raises KernelError naming op, module, entry, target and the building command when it
        is not declared, not built, or built of other sources than are here now.
        """
        already = self._found.get((module, entry))
        if already is not None:
            return already
        what = f"kernel {entry!r} of module {module!r}" + (f" for op {op}" if op else "") + f" on {self.target}"
        for layer in self._layers:
            unit = self._units[layer].get(module)
            if unit is not None:
                found = self._found[module, entry] = self._checked(layer, unit, entry, what)
                return found
        known = sorted({name for units in self._units.values() for name in units})
        raise KernelError(
            f"There is no {what}",
            f"Declared modules: {', '.join(known) or 'none'}.",
            "Declare it in a KERNEL.toml, or choose another implementation.",
        )

    def found(self) -> tuple[CompiledKernel, ...]:
        """Every entry that was found so far."""
        return tuple(self._found.values())

    def modules(self) -> tuple[tuple[str, str], ...]:
        """(module, layer) of every module that the target sees, by name."""
        seen: dict[str, str] = {}
        for layer in reversed(self._layers):
            seen |= dict.fromkeys(self._units[layer], layer)
        return tuple(sorted(seen.items()))

    def stale(self) -> Mapping[str, str]:
        """Why a module cannot be used, for each that cannot: not built, or built of other sources."""
        reasons = {}
        for module, layer in self.modules():
            reason = self._reason(layer, self._units[layer][module])
            if reason:
                reasons[module] = reason
        return reasons

    def digest(self) -> str:
        """SHA-256 over all binaries of the target: part of what identifies a running system."""
        records = ((layer, self._compiled[layer]) for layer in self._layers)
        lines = [
            f"{layer} {name} {module.sha256}"
            for layer, record in records
            if record is not None
            for name, module in sorted(record.modules.items())
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _folder(self, layer: str) -> Path:
        if layer == COMMON:
            owner = self._tree.require(self.target.hardware).package
        else:
            owner = self._tree.leaves[self.target.hardware, self.target.model, self.target.quant].package
        return self._places.compiled(owner, self.target.hardware, self.target.arch, layer)

    def _read(self, layer: str) -> CompiledLayer | None:
        path = self._folder(layer) / MANIFEST
        try:
            return load(path.read_text("utf-8"), str(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise KernelError(f"{path} cannot be read: {error}", cure="Correct its permissions.") from error

    def _reason(self, layer: str, unit: Unit) -> str:
        """Why a binary cannot be used, or nothing; the tree does not change, so each is judged once."""
        key = layer, unit.module
        if key not in self._reasons:
            self._reasons[key] = self._judge(layer, unit)
        return self._reasons[key]

    def _judge(self, layer: str, unit: Unit) -> str:
        compiled = self._compiled[layer]
        record = None if compiled is None else compiled.modules.get(unit.module)
        if record is None or not (self._folder(layer) / record.file).is_file():
            return f"It is not built: {self._folder(layer)} has no {unit.module}."
        files = dict(record.files)
        if not unchanged(files, self._searched(unit), self._tree.read):
            files = closure(unit.source, unit.includes, self._tree.read)
        if source_key(unit, files, self.target.arch) == record.source_key:
            return ""
        changed = sorted(
            path for path in files.keys() | record.files.keys() if files.get(path) != record.files.get(path)
        )
        return f"It is stale: {', '.join(changed) or 'its declaration'} changed since it was built."

    def _searched(self, unit: Unit) -> Iterator[str]:
        """Every file of the packages in which a unit's includes are looked for."""
        for package in {path.partition(":")[0] for path in (unit.source, *unit.includes)}:
            yield from (f"{package}:{path}" for path in self._tree.roots[package].files)

    def _checked(self, layer: str, unit: Unit, entry: str, what: str) -> CompiledKernel:
        compiled, command = self._compiled[layer], build_command(self.target.hardware, self.target.arch, layer)
        if entry not in {declared.name for declared in unit.entries}:
            names = ", ".join(declared.name for declared in unit.entries)
            raise KernelError(f"There is no {what}", f"The module declares {names}.", "Correct the entry's name.")
        reason = self._reason(layer, unit)
        if reason or compiled is None:
            raise KernelError(f"Cannot use {what}", reason, f"Run: {command}")
        record = compiled.modules[unit.module]
        found = record.entries[entry]
        return CompiledKernel(
            unit.module,
            entry,
            self._folder(layer) / record.file,
            record.sha256,
            found.params,
            record.origin,
            found.registers,
            found.spills,
            found.shared,
        )
