"""The kernel tree: its folders, and which source every binary of a target is made of.

    kernels/<hw>/HARDWARE.toml
    kernels/<hw>/common/KERNEL.toml  sources        every model on this hardware
    kernels/<hw>/<model>/<quant>/KERNEL.toml  …     one leaf: only what it adds or replaces

Layers stand from general to specific: common of the extended hardware, common, leaf.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from atlas_core.kernels.manifest import (
    BuildOptions,
    EntryDecl,
    HardwareManifest,
    KernelManifest,
)
from atlas_core.vocab.errors import KernelError

KERNEL_TOML = "KERNEL.toml"
HARDWARE_TOML = "HARDWARE.toml"
COMMON = "common"
CORE_INCLUDE = "atlas_core:include"
SOURCE_SUFFIXES = frozenset({".c", ".cc", ".cpp", ".cu", ".hip", ".metal"})
HEADER_SUFFIXES = frozenset({".h", ".hpp", ".cuh", ".inc"})


def stem(name: str) -> str:
    """A file name without its last suffix."""
    return name.rpartition(".")[0] or name


def suffix(name: str) -> str:
    """The last suffix of a file name with its dot; empty when there is none."""
    head, dot, tail = name.rpartition(".")
    return dot + tail if head else ""


class RootFiles(Struct, frozen=True):
    """The files of one root, by POSIX path below its folder ``kernels``; ``links`` are the symlinks, with targets."""

    package: str
    files: Mapping[str, bytes]
    links: Mapping[str, str] = field(default_factory=dict)


class Finding(Struct, frozen=True):
    """One thing that is wrong in the tree: where, what, and what to do."""

    where: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} ({self.cure})"


class Folder(Struct, frozen=True):
    """One folder with a KERNEL.toml. ``id`` is ``package:path``; ``layer`` is ``common`` or ``model/quant``."""

    package: str
    path: str
    hardware: str
    layer: str
    manifest: KernelManifest
    files: frozenset[str]

    @property
    def id(self) -> str:
        """``package:path``, the form in which the tree names files."""
        return f"{self.package}:{self.path}"

    @property
    def sources(self) -> frozenset[str]:
        """Names of the files that a compiler may be started on."""
        return frozenset(name for name in self.files if suffix(name) in SOURCE_SUFFIXES)


class Hardware(Struct, frozen=True):
    """One machine of the tree; ``common`` is None when it inherits everything."""

    package: str
    manifest: HardwareManifest
    common: Folder | None


class Unit(Struct, frozen=True):
    """One binary of one layer, and what it is made of.

    ``source`` and ``includes`` are ``package:path`` ids; ``package`` owns the output. ``origin`` says why this source.
    """

    package: str
    hardware: str
    layer: str
    module: str
    source: str
    includes: tuple[str, ...]
    flags: tuple[str, ...]
    defines: tuple[tuple[str, str], ...]
    entries: tuple[EntryDecl, ...]
    max_spill_bytes: int
    origin: str


class _Module(Struct, frozen=True):
    """A module while layers are stacked: ``decided`` is the layer that last had a say, ``home`` the source's layer."""

    name: str
    source: str
    home: int
    decided: int
    options: BuildOptions
    defines: tuple[tuple[str, str], ...]
    entries: tuple[EntryDecl, ...]
    origin: str


class KernelTree(Struct, frozen=True):
    """``hardware`` by name, ``leaves`` by (hardware, model, quant); ``findings`` are what did not fit.

    ``dormant`` folders are for hardware that no installed plugin declares: usual for a model plugin, a misspelling in
    a checkout.
    """

    roots: Mapping[str, RootFiles]
    hardware: Mapping[str, Hardware]
    leaves: Mapping[tuple[str, str, str], Folder]
    dormant: tuple[Folder, ...]
    findings: tuple[Finding, ...]

    def read(self, path: str) -> bytes | None:
        """The bytes behind a ``package:path`` id, or None when there is no such file."""
        package, _, relative = path.partition(":")
        root = self.roots.get(package)
        return None if root is None else root.files.get(relative)

    def require(self, hardware: str) -> Hardware:
        """The hardware of that name. Raises KernelError: what is wrong with its folder, else the known ones."""
        found = self.hardware.get(hardware)
        if found is None:
            self.refuse_findings(folder=hardware)
            known = ", ".join(sorted(self.hardware)) or "none"
            raise KernelError(
                f"No kernel tree for the hardware {hardware!r}",
                f"Known: {known}.",
                "Install the plugin that brings it.",
            )
        return found

    def refuse_findings(self, packages: frozenset[str] = frozenset(), folder: str = "") -> None:
        """Raise KernelError when anything is wrong in these packages, or below ``folder`` in any.

        The folder matters because a broken leaf is in no table: without it, common would be taken silently.
        """
        found = []
        for finding in self.findings:
            package, _, path = finding.where.partition(":")
            if package in packages or (folder and f"{path}/".startswith(f"{folder}/")):
                found.append(str(finding))
        if found:
            raise KernelError(
                "The kernel tree is broken", "\n".join(found), "Correct it; atlas kernels lint shows everything."
            )

    def lost(self) -> tuple[Finding, ...]:
        """Kernel roots that could not be read at all: harmless until somebody asks for what they bring."""
        return tuple(finding for finding in self.findings if finding.where.endswith(":"))

    def require_roots(self, packages: Iterable[str]) -> None:
        """Raise KernelError when the kernels of one of these packages could not be read at all."""
        asked = {f"{package}:" for package in packages}
        found = [str(finding) for finding in self.lost() if finding.where in asked]
        if found:
            raise KernelError("Kernels of a plugin cannot be read", "\n".join(found), "Reinstall the plugin.")

    def chain(self, hardware: str) -> tuple[Hardware, ...]:
        """The hardware and what it extends, most specific first. Raises KernelError for an unknown or circular one."""
        chain: list[Hardware] = []
        name: str | None = hardware
        while name is not None:
            found = self.require(name)
            if found in chain:
                raise KernelError(
                    f"{hardware} extends itself through {name}", cure="Break the circle in HARDWARE.toml."
                )
            chain.append(found)
            name = found.manifest.extends
        return tuple(chain)

    def declarations(self, hardware: str, layer: str = COMMON) -> tuple[str, ...]:
        """The ids of every TOML file that has a say in a layer, most specific first."""
        found = []
        if layer != COMMON:
            model, _, quant = layer.partition("/")
            found.append(f"{self.leaves[hardware, model, quant].id}/{KERNEL_TOML}")
        for machine in self.chain(hardware):
            if machine.common is not None:
                found.append(f"{machine.common.id}/{KERNEL_TOML}")
            found.append(f"{machine.package}:{machine.manifest.name}/{HARDWARE_TOML}")
        return tuple(found)

    def layer(self, hardware: str, model: str, quant: str) -> str:
        """``model/quant`` when that leaf exists, else ``common``."""
        return f"{model}/{quant}" if (hardware, model, quant) in self.leaves else COMMON

    def units(self, hardware: str, layer: str = COMMON) -> tuple[Unit, ...]:
        """Every binary of one layer, by module name. A leaf holds only what it adds, replaces or tunes.

        Raises KernelError with the findings that stand in the way.
        """
        units, findings = self.stack(hardware, layer)
        if findings:
            raise KernelError(
                f"The kernel tree of {hardware}/{layer} is broken",
                "\n".join(map(str, findings)),
                "atlas kernels lint shows everything that is wrong.",
            )
        return units

    def stack(self, hardware: str, layer: str = COMMON) -> tuple[tuple[Unit, ...], tuple[Finding, ...]]:
        """As ``units``, with what is wrong as values."""
        chain = self.chain(hardware)
        owner = chain[0]
        layers = [machine.common for machine in reversed(chain) if machine.common is not None]
        package, first = owner.package, 0
        if layer != COMMON:
            model, _, quant = layer.partition("/")
            leaf = self.leaves.get((hardware, model, quant))
            if leaf is None:
                raise KernelError(f"There is no leaf {hardware}/{layer}", cure="atlas kernels list shows the leaves.")
            layers.append(leaf)
            package, first = leaf.package, len(layers) - 1
        modules, findings = _stack(layers)
        units = []
        for module in sorted(modules.values(), key=lambda module: module.name):
            if module.decided < first:
                continue
            home = layers[module.home]
            options = [
                *(machine.manifest.flags for machine in reversed(chain)),
                home.manifest.build.flags,
                module.options.flags,
            ]
            bound = module.options.max_spill_bytes
            units.append(
                Unit(
                    package,
                    hardware,
                    layer,
                    module.name,
                    source=f"{home.id}/{module.source}",
                    includes=(*(folder.id for folder in reversed(layers[: module.home + 1])), CORE_INCLUDE),
                    flags=tuple(flag for flags in options for flag in flags),
                    defines=module.defines,
                    entries=module.entries,
                    max_spill_bytes=bound if bound is not None else home.manifest.build.max_spill_bytes or 0,
                    origin=module.origin,
                )
            )
        return tuple(units), tuple(findings)


def _stack(layers: Sequence[Folder]) -> tuple[dict[str, _Module], list[Finding]]:
    modules: dict[str, _Module] = {}
    findings: list[Finding] = []
    for index, folder in enumerate(layers):
        findings += _header_clashes(folder, layers[:index])
        used = _shadow_sources(index, folder, modules, findings)
        for decl in folder.manifest.modules:
            if decl.name in modules:
                findings.append(
                    Finding(
                        folder.id,
                        f"module {decl.name!r} is already declared by {modules[decl.name].origin}",
                        "to replace its source add the file and a line under [shadows]; else rename it",
                    )
                )
                continue
            entries = tuple(entry for entry in folder.manifest.entries if entry.module == decl.name)
            modules[decl.name] = _Module(decl.name, decl.source, index, index, decl.options, (), entries, folder.id)
        for instance in folder.manifest.instances:
            base = modules.get(instance.module)
            old = modules.get(instance.name)
            if base is None:
                findings.append(
                    Finding(
                        folder.id,
                        f"instance {instance.name!r} is of the unknown module {instance.module!r}",
                        "name a module of this layer or of one below",
                    )
                )
                continue
            if old is not None:
                if instance.name not in folder.manifest.shadows or old.source != base.source:
                    findings.append(
                        Finding(
                            folder.id,
                            f"instance {instance.name!r} is already declared by {old.origin}",
                            "rename it, or give the reason for other constants under [shadows]",
                        )
                    )
                    continue
                used.add(instance.name)
            origin = f"{folder.id} (instance of {base.name})"
            modules[instance.name] = _Module(
                instance.name, base.source, base.home, index, base.options, instance.defines, base.entries, origin
            )
        for name in sorted(folder.manifest.shadows.keys() - used):
            findings.append(
                Finding(
                    folder.id,
                    f"[shadows] names {name!r}, which replaces nothing",
                    "remove the line, or add the file or instance that it speaks of",
                )
            )
    return modules, findings


def _shadow_sources(index: int, folder: Folder, modules: dict[str, _Module], findings: list[Finding]) -> set[str]:
    """Let the folder's sources replace their namesakes below; returns the stems that did."""
    used: set[str] = set()
    for name in sorted(folder.sources):
        below = [module for module in modules.values() if stem(module.source) == stem(name)]
        if not below:
            continue
        used.add(stem(name))
        if stem(name) not in folder.manifest.shadows:
            findings.append(
                Finding(
                    f"{folder.id}/{name}",
                    f"replaces the file of {below[0].origin} without saying so",
                    f'add [shadows] {stem(name)} = "the reason"',
                )
            )
        for module in below:
            if module.source != name:
                findings.append(
                    Finding(
                        f"{folder.id}/{name}",
                        f"cannot replace {module.source}, which is in another language",
                        "rename it",
                    )
                )
                continue
            origin = f"{folder.id} (shadows {module.origin})"
            # The replacing folder answers for spills: the old bound was measured on the old source.
            options = BuildOptions(module.options.flags)
            modules[module.name] = _Module(
                module.name, name, index, index, options, module.defines, module.entries, origin
            )
    return used


def _header_clashes(folder: Folder, below: Sequence[Folder]) -> Iterator[Finding]:
    headers = {name for name in folder.files if suffix(name) in HEADER_SUFFIXES}
    for other in below:
        for name in sorted(headers & other.files):
            yield Finding(
                f"{folder.id}/{name}",
                f"has the name of a header of {other.id}, whose own sources would not see it",
                "rename it; only sources can be replaced",
            )
