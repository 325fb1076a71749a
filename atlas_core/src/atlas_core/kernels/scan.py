"""Reading kernel roots from installed packages into a tree."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.assemble import assemble
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


def read_root(package: str, folder: Path) -> RootFiles:
    """Every file below ``folder`` but hidden ones, which are editors' business. Raises KernelError when unreadable."""
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    try:
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
                continue
            if path.is_symlink():
                links[relative.as_posix()] = str(path.readlink())
            if path.is_file():
                files[relative.as_posix()] = path.read_bytes()
            elif path.is_symlink():
                raise KernelError(
                    f"{path} is a symlink to no file", "Only single files are shared.", "Correct or remove it."
                )
    except OSError as error:
        raise KernelError(
            f"The kernels of {package} cannot be read: {error}", cure="Correct the permissions."
        ) from error
    return RootFiles(package, files, links)


def scan(roots: Iterable[KernelRoot]) -> tuple[KernelTree, Places]:
    """The tree of all declared roots and core's shared headers.

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
    return _join(found, folders, findings)


def _folder(package: str, roots: Sequence[KernelRoot]) -> Path:
    """Where the one root of a package lies. Raises KernelError."""
    if len(roots) > 1:
        names = ", ".join(root.folder for root in roots)
        raise KernelError("two kernel roots are declared", names, "keep one folder a package")
    try:
        folder = Path(str(resources.files(package))) / roots[0].folder
    except (ModuleNotFoundError, TypeError) as error:  # TypeError: a module without a folder
        raise KernelError(
            "the package of a kernel root is not installed", str(error), "reinstall its plugin"
        ) from error
    if not folder.is_dir():
        raise KernelError(f"the kernel root {folder} does not exist", cure="reinstall the plugin that declares it")
    return folder


def scan_folders(folders: Mapping[str, Path]) -> tuple[KernelTree, Places]:
    """The tree of folders named ``kernels``, by package, and of core's shared headers."""
    return _join([read_root(package, folder) for package, folder in folders.items()], folders, ())


def _join(
    roots: Sequence[RootFiles], folders: Mapping[str, Path], findings: Sequence[Finding]
) -> tuple[KernelTree, Places]:
    package, _, include = CORE_INCLUDE.partition(":")
    core = Path(str(resources.files(package))) / "kernels"
    # Core's folder is a Python package as well: only its headers belong to the tree.
    headers = read_root(package, core / include)
    shared = RootFiles(package, {f"{include}/{path}": content for path, content in headers.files.items()})
    tree = assemble([shared, *roots])
    return replace(tree, findings=(*findings, *tree.findings)), Places({package: core, **folders})
