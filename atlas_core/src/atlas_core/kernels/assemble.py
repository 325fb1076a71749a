"""The union of all kernel roots: one owner a folder, and everything declared is there and the reverse."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from atlas_core.kernels.manifest import HardwareManifest, parse_hardware_manifest, parse_kernel_manifest
from atlas_core.kernels.tree import (
    COMMON,
    HARDWARE_TOML,
    HEADER_SUFFIXES,
    KERNEL_TOML,
    Finding,
    Folder,
    Hardware,
    KernelTree,
    RootFiles,
    stem,
    suffix,
)
from atlas_core.vocab.errors import KernelError

Machines = Callable[[Mapping[str, HardwareManifest]], Collection[str]]
"""Given every declared machine, the names of those whose kernels are wanted; what these extend comes with them."""


class _Assembly:
    def __init__(self, roots: Sequence[RootFiles]) -> None:
        self.roots = {root.package: root for root in roots}
        self.machines: list[tuple[RootFiles, str, HardwareManifest]] = []
        self.wanted: frozenset[str] | None = None
        self.findings: list[Finding] = []
        self.hardware: dict[str, Hardware] = {}
        self.owners: dict[tuple[str, str], Folder] = {}
        if len(self.roots) != len(roots):
            raise KernelError("A package offers two kernel roots", cure="Keep one folder named kernels a package.")

    def folders(self, root: RootFiles) -> Iterator[tuple[str, frozenset[str]]]:
        names: dict[str, set[str]] = {}
        for path in root.files:
            folder, _, name = path.rpartition("/")
            names.setdefault(folder, set()).add(name)
        for folder in sorted(names):
            yield folder, frozenset(names[folder])

    def add_folder(self, root: RootFiles, folder: str, names: frozenset[str]) -> None:
        where, parts = f"{root.package}:{folder}", folder.split("/")
        if len(parts) == 1:
            strays = names - {HARDWARE_TOML}
            self.findings += [
                Finding(f"{where}/{name}", "is read by nobody", "move it into common or a leaf")
                for name in sorted(strays)
            ]
            return
        if self.wanted is not None and parts[0] not in self.wanted:
            return
        layer = COMMON if parts[1:] == [COMMON] else "/".join(parts[1:]) if len(parts) == 3 else None
        if layer is None or (len(parts) == 3 and parts[1] == COMMON):
            self.findings.append(Finding(where, "is not <hw>/common or <hw>/<model>/<quant>", "move the files"))
            return
        if KERNEL_TOML not in names:
            self.findings.append(Finding(where, f"has no {KERNEL_TOML}", "declare its modules and entries"))
            return
        try:
            manifest = parse_kernel_manifest(self.text(root, f"{folder}/{KERNEL_TOML}"), f"{where}/{KERNEL_TOML}")
        except KernelError as error:
            self.findings.append(Finding(where, error.what, error.cure))
            return
        found = Folder(root.package, folder, parts[0], layer, manifest, names)
        other = self.owners.setdefault((parts[0], layer), found)
        if other is not found:
            self.findings.append(
                Finding(where, f"is also owned by {other.package}", "one package owns a folder; uninstall the other")
            )
            return
        self.check_files(found)

    def text(self, root: RootFiles, path: str) -> str:
        try:
            return root.files[path].decode("utf-8")
        except UnicodeDecodeError as error:
            raise KernelError(f"{root.package}:{path} is not UTF-8", cure="Save it as UTF-8.") from error

    def check_files(self, folder: Folder) -> None:
        declared = {module.source for module in folder.manifest.modules}
        stems = set(folder.manifest.shadows)
        for name in sorted(declared - folder.files):
            self.findings.append(
                Finding(f"{folder.id}/{KERNEL_TOML}", f"source {name!r} does not exist", "correct the name")
            )
        for name in sorted(folder.sources - declared):
            if stem(name) not in stems:
                self.findings.append(
                    Finding(
                        f"{folder.id}/{name}",
                        "is declared by no [[module]] and shadows nothing",
                        "declare it in KERNEL.toml or delete it",
                    )
                )
        for name in sorted((declared - folder.sources) & folder.files):
            self.findings.append(Finding(f"{folder.id}/{name}", "is not a source file by its extension", "rename it"))
        others = folder.files - folder.sources - {KERNEL_TOML}
        for name in sorted(others):
            if suffix(name) not in HEADER_SUFFIXES and suffix(name) != ".md":
                self.findings.append(
                    Finding(f"{folder.id}/{name}", "is neither source nor header", "move or delete it")
                )

    def read_hardware(self, root: RootFiles, folder: str) -> None:
        where = f"{root.package}:{folder}/{HARDWARE_TOML}"
        try:
            manifest = parse_hardware_manifest(self.text(root, f"{folder}/{HARDWARE_TOML}"), where)
        except KernelError as error:
            self.findings.append(Finding(where, error.what, error.cure))
            return
        if manifest.name != folder:
            self.findings.append(
                Finding(where, f"calls itself {manifest.name!r} in a folder {folder!r}", "make them equal")
            )
            return
        self.machines.append((root, folder, manifest))

    def want(self, machines: Machines) -> None:
        """Leave the folders of all other machines alone."""
        declared = {folder: manifest for _, folder, manifest in self.machines}
        wanted: set[str] = set()
        for name in machines(declared):
            extended: str | None = name
            while extended is not None and extended not in wanted:
                wanted.add(extended)
                extended = declared[extended].extends if extended in declared else None
        self.wanted = frozenset(wanted)

    def add_hardware(self, root: RootFiles, folder: str, manifest: HardwareManifest) -> None:
        where = f"{root.package}:{folder}/{HARDWARE_TOML}"
        other = self.hardware.get(folder)
        if other is not None:
            self.findings.append(Finding(where, f"is also declared by {other.package}", "one package owns a hardware"))
            return
        common = self.owners.get((folder, COMMON))
        if common is not None and common.package != root.package:
            self.findings.append(
                Finding(common.id, f"belongs to {root.package}, which declares {folder}", "make it a leaf")
            )
            common = None
        self.hardware[folder] = Hardware(root.package, manifest, common)

    def check_relations(self) -> None:
        for name, machine in self.hardware.items():
            base = machine.manifest.extends
            if base is None:
                continue
            where = f"{machine.package}:{name}/{HARDWARE_TOML}"
            if base not in self.hardware:
                self.findings.append(
                    Finding(where, f"extends {base!r}, which nobody declares", "install the plugin that brings it")
                )
            elif self.hardware[base].manifest.vendor != machine.manifest.vendor:
                self.findings.append(
                    Finding(where, f"extends {base!r} of another vendor", "kernels are inherited within a toolchain")
                )
        for (hardware, layer), folder in self.owners.items():
            if layer == COMMON and hardware not in self.hardware:
                self.findings.append(
                    Finding(
                        folder.id,
                        f"is for the hardware {hardware!r}, which this package does not declare",
                        f"add {HARDWARE_TOML} beside it",
                    )
                )
            elif hardware in self.hardware and layer != COMMON and self.hardware[hardware].manifest.abstract:
                self.findings.append(
                    Finding(folder.id, f"is a leaf of {hardware!r}, which is abstract", "make it a leaf of a machine")
                )


def assemble(roots: Sequence[RootFiles], machines: Machines | None = None) -> KernelTree:
    """Join the roots. Nothing raises for a broken folder: it is left out and reported in ``findings``.

    With ``machines``, what is not theirs is neither read nor judged: other machines stand in ``hardware`` alone, without kernels.

    Raises KernelError when one package is given twice.
    """
    work = _Assembly(roots)
    for root in roots:
        for path in root.files:
            folder, _, name = path.rpartition("/")
            if name == HARDWARE_TOML and "/" not in folder and folder:
                work.read_hardware(root, folder)
    if machines is not None:
        work.want(machines)
    for root in roots:
        for folder, names in work.folders(root):
            if folder == "":
                work.findings += [
                    Finding(f"{root.package}:{n}", "is read by nobody", "delete it") for n in sorted(names)
                ]
            elif folder != "include":
                work.add_folder(root, folder, names)
    for root, folder, manifest in work.machines:
        work.add_hardware(root, folder, manifest)
    work.check_relations()
    leaves: dict[tuple[str, str, str], Folder] = {}
    dormant: list[Folder] = []
    for (hardware, layer), found in work.owners.items():
        model, _, quant = layer.partition("/")
        if layer != COMMON and hardware in work.hardware:
            leaves[hardware, model, quant] = found
        elif layer != COMMON:
            dormant.append(found)
    return KernelTree(work.roots, work.hardware, leaves, tuple(dormant), tuple(work.findings))
