"""Synthetic kernel trees: folders named after packages, each with a folder ``kernels``."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from atlas_core.kernels.scan import Places, scan_folders
from atlas_core.kernels.tree import KernelTree

MakeTree = Callable[[Mapping[str, str]], tuple[KernelTree, Places]]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """A function of {"package/hw/…": text}: writes the files, reads the tree. Call it again to change some."""
    packages: dict[str, Path] = {}

    def make(files: Mapping[str, str]) -> tuple[KernelTree, Places]:
        for name, text in files.items():
            package, _, relative = name.partition("/")
            packages[package] = tmp_path / package / "kernels"
            path = packages[package] / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return scan_folders(packages)

    return make
