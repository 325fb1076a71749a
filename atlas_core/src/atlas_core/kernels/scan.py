"""Reading kernel roots from installed packages into a tree."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.assemble import Machines, assemble
from atlas_core.kernels.tree import CORE_INCLUDE, Finding, KernelTree, RootFiles
from atlas_core.vocab.errors import KernelError

COMPILED = "_compiled"


class Places:
    """Where the packages lie on disk, so that ids of the tree become paths."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    def path(self, identifier: str) -> Path:
        """The path of a ``package:path`` id."""
        package, _, relative = identifier.partition(":")
        return self._folders[package] / relative

    def compiled(self, package: str, hardware: str, arch: str, layer: str) -> Path:
        """The folder of one layer's binaries, beside the package's kernels: ``_compiled/<hw>/<arch>/<layer>``."""
        return self._folders[package].parent / COMPILED / hardware / arch / layer


class _OnDisk(Mapping[str, bytes]):
    """The files below a folder, listed once; each is read when somebody looks into it."""

    def __init__(self, package: str, paths: Mapping[str, str]) -> None:
        self._package = package
        self._paths = paths
        self._read: dict[str, bytes] = {}

    def __getitem__(self, relative: str) -> bytes:
        found = self._read.get(relative)
        if found is None:
            with _reading(self._package):
                found = self._read[relative] = Path(self._paths[relative]).read_bytes()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


@contextmanager
def _reading(package: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KernelError(
            f"The kernels of {package} cannot be read: {error}", cure="Correct the permissions."
        ) from error


def read_root(package: str, folder: Path) -> RootFiles:
    """Every file below ``folder`` but hidden ones, which are editors' business.

    Raises KernelError when a folder is unreadable; looking into a file that is raises it then.
    """
    paths: dict[str, str] = {}
    links: dict[str, str] = {}
    with _reading(package):
        _list(str(folder), "", paths, links)
    return RootFiles(package, _OnDisk(package, dict(sorted(paths.items()))), links)


def _list(folder: str, above: str, paths: dict[str, str], links: dict[str, str]) -> None:
    with os.scandir(folder) as listed:
        entries = list(listed)
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        relative = above + entry.name
        if entry.is_symlink():
            links[relative] = str(Path(entry.path).readlink())
            if not Path(entry.path).exists():
                raise KernelError(
                    f"{entry.path} is a symlink to no file", "Only single files are shared.", "Correct or remove it."
                )
        if entry.is_file():
            paths[relative] = entry.path
        elif entry.is_dir(follow_symlinks=False):
            _list(entry.path, f"{relative}/", paths, links)


def scan(roots: Iterable[KernelRoot], machines: Machines | None = None) -> tuple[KernelTree, Places]:
    """The tree of all declared roots and core's shared headers; of those that ``machines`` asks for, see ``assemble``.

    A root that is missing, unreadable or declared twice is a finding at ``package:``, so that it harms those only who ask for
    what it should bring (``KernelTree.require_roots``).
    """
    declared: dict[str, list[KernelRoot]] = {}
    for root in dict.fromkeys(roots):
        declared.setdefault(root.package, []).append(root)
    found: list[RootFiles] = []
    folders: dict[str, Path] = {}
    findings: list[Finding] = []
    for package, wanted in declared.items():
        try:
            folder = _folder(package, wanted)
            found.append(read_root(package, folder))
        except KernelError as error:
            findings.append(Finding(f"{package}:", ": ".join(filter(None, (error.what, error.why))), error.cure))
        else:
            folders[package] = folder
    return _join(found, folders, findings, machines)


def _folder(package: str, roots: Sequence[KernelRoot]) -> Path:
    """Where the one root of a package lies. Raises KernelError."""
    if len(roots) > 1:
        names = ", ".join(root.folder for root in roots)
        raise KernelError("two kernel roots are declared", names, "keep one folder a package")
    folder = _package(package) / roots[0].folder
    if not folder.is_dir():
        raise KernelError(f"the kernel root {folder} does not exist", cure="reinstall the plugin that declares it")
    return folder


def _package(name: str) -> Path:
    """Where a package lies; importlib.resources would load what opens archives to say so. Raises KernelError."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError as error:
        raise KernelError(
            "the package of a kernel root is not installed", str(error), "reinstall its plugin"
        ) from error
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        why = f"{name} is a module without a folder" if spec else f"No module named {name!r}"
        raise KernelError("the package of a kernel root is not installed", why, "reinstall its plugin")
    return Path(places[0])


def scan_folders(folders: Mapping[str, Path]) -> tuple[KernelTree, Places]:
    """The tree of folders named ``kernels``, by package, and of core's shared headers."""
    return _join([read_root(package, folder) for package, folder in folders.items()], folders, ())


def _join(
    roots: Sequence[RootFiles],
    folders: Mapping[str, Path],
    findings: Sequence[Finding],
    machines: Machines | None = None,
) -> tuple[KernelTree, Places]:
    package, _, include = CORE_INCLUDE.partition(":")
    core = _package(package) / "kernels"
    # Core's folder is a Python package as well: only its headers belong to the tree.
    headers = read_root(package, core / include)
    shared = RootFiles(
        package, _OnDisk(package, {f"{include}/{path}": str(core / include / path) for path in headers.files})
    )
    tree = assemble([shared, *roots], machines)
    return replace(tree, findings=(*findings, *tree.findings)), Places({package: core, **folders})
