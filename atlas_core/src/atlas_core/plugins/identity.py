"""What is installed, by its bytes: two processes that serve together must agree on it, and answers are marked with it."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

Identity = tuple[tuple[str, str], ...]
"""(distribution, its version and the first digits of the SHA-256 of its files), sorted."""

_DIGITS = 12
_DERIVED = frozenset({"__pycache__", "_compiled"})
"""Made from the other files. Binaries have a digest of their own (``KernelLibrary.digest``)."""


def identity(plugins: Iterable[tuple[str, str, str]]) -> Identity:
    """Of the distributions of plugins given as (distribution, version, module). Reads their files and imports nothing."""
    found: dict[tuple[str, str], set[str]] = {}
    for dist, version, module in plugins:
        found.setdefault((dist, version), set()).add(module.partition(".")[0])
    return tuple(sorted((dist, f"{version} {_digest(packages)}") for (dist, version), packages in found.items()))


def difference(ours: Identity, theirs: Identity) -> str:
    """How another process's installation differs from this one's, in words; empty when they agree."""
    here, there = dict(ours), dict(theirs)
    return "; ".join(
        f"{name} is {here.get(name, 'not installed')} here and {there.get(name, 'not installed')} there"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    )


def _digest(packages: Iterable[str]) -> str:
    """First digits of the SHA-256 over the names and bytes of everything in these packages."""
    total = hashlib.sha256()
    for package in sorted(packages):
        for name, path in _files(package):
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123  500 Paths take twice as long as reading and hashing
                total.update(f"{package} {name} {hashlib.sha256(file.read()).hexdigest()}\n".encode())
    return total.hexdigest()[:_DIGITS]


def _files(package: str) -> list[tuple[str, str]]:
    """(name inside the package, path) of every file but those that are derived; none when it cannot be found."""
    spec = find_spec(package)
    if spec is None:
        return []
    folders = spec.submodule_search_locations or ()
    if not folders and spec.origin is not None:
        return [(Path(spec.origin).name, spec.origin)]
    return sorted(found for folder in folders for found in _below(folder, ""))


def _below(folder: str, above: str) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in _DERIVED:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, f"{above}{entry.name}/")
            elif entry.is_file():
                yield above + entry.name, entry.path
