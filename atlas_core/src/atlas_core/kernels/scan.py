"""Reading kernel roots from installed packages into a tree."""

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.assemble import assemble
from atlas_core.kernels.tree import CORE_INCLUDE, KernelTree, RootFiles
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

    Raises KernelError when a package is missing, lies in no folder, has no such root, or declares two.
    """
    folders: dict[str, Path] = {}
    for root in dict.fromkeys(roots):
        try:
            folder = Path(str(resources.files(root.package))) / root.folder
        except ModuleNotFoundError as error:
            raise KernelError(
                f"The package {root.package} of a kernel root is not installed", cure="Reinstall its plugin."
            ) from error
        if not folder.is_dir():
            raise KernelError(
                f"The kernel root {folder} does not exist", f"{root.package} declares it.", "Reinstall the plugin."
            )
        if root.package in folders:
            raise KernelError(f"{root.package} declares two kernel roots", cure="Keep one folder a package.")
        folders[root.package] = folder
    return scan_folders(folders)


def scan_folders(folders: Mapping[str, Path]) -> tuple[KernelTree, Places]:
    """The tree of folders named ``kernels``, by package, and of core's shared headers."""
    package, _, include = CORE_INCLUDE.partition(":")
    core = Path(str(resources.files(package))) / "kernels"
    # Core's folder is a Python package as well: only its headers belong to the tree.
    headers = read_root(package, core / include)
    shared = RootFiles(package, {f"{include}/{path}": content for path, content in headers.files.items()})
    roots = [shared, *(read_root(name, folder) for name, folder in folders.items())]
    return assemble(roots), Places({package: core, **folders})
