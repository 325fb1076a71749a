"""The records of all plugins, without importing one of them."""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from atlas_core.assembly.kept import file, marks
from atlas_core.contracts.declarations import Declaration
from atlas_core.plugins.identity import Identity
from atlas_core.plugins.registry import GROUPS, Known, PluginRecord, Registry, Status
from atlas_core.vocab.errors import AtlasError

_KINDS = {kind.__name__: kind for hooks in GROUPS.values() for kind in hooks.values()}
_TARGET = re.compile(r"(\w+)[\w.]*:[\w.]+")
_VARIABLES = ("ATLAS_PLUGINS",)
"""Variables besides the settings that decide what is found."""


class _Record(Struct, array_like=True):
    """A PluginRecord; declarations behind the names of their kinds."""

    group: str
    key: str
    dist: str
    version: str
    entry_point: str
    status: Status
    reason: str
    milliseconds: float
    declarations: tuple[tuple[str, msgspec.Raw], ...]


class _Kept(Struct, array_like=True):
    """``folders`` are those of all packages that plugins name, ``digest`` is of what they depend on."""

    digest: str
    folders: tuple[str, ...]
    identity: Identity
    records: tuple[_Record, ...]


def place(folder: Path) -> Path:
    """Every environment, and every way to start Python in it, has a file of its own."""
    where = hashlib.sha256(
        "\n".join([sys.version, sys.prefix, *sys.path]).encode("utf-8", "surrogateescape")
    ).hexdigest()
    return folder / f"{where[:16]}.installed"


def find(folder: Path) -> Registry | None:
    """What was kept in ``folder``; None where there is nothing, or where something has changed since."""
    data = file.read(place(folder))
    if data is None:
        return None
    try:
        kept = msgspec.msgpack.decode(data, type=_Kept)
        if _mark(kept.folders).digest != kept.digest:
            return None
        found = Registry.of(_restored(record) for record in kept.records)
    except (msgspec.MsgspecError, OSError, KeyError, AtlasError):
        return None
    return replace(found, known=Known(kept.digest, kept.identity))


def keep(folder: Path, registry: Registry) -> str:
    """Keep what ``registry`` has, and give the digest of what it depends on. Raises OSError.

    Empty where that may not be: a plugin is broken, which the next start may find mended, or something has changed since it was found.
    """
    if registry.known is not None:
        return registry.known.digest
    if registry.broken():
        return ""
    folders = tuple(sorted(_folders(registry)))
    mark = _mark(folders)
    if not mark.older(registry.began):
        return ""
    kept = _Kept(mark.digest, folders, registry.identity(), tuple(map(_stripped, registry.records)))
    file.write(place(folder), msgspec.msgpack.encode(kept))
    return mark.digest


def _mark(folders: Iterable[str]) -> marks.Mark:
    return marks.installed(folders, [(name, os.environ[name]) for name in _VARIABLES if name in os.environ])


def _stripped(record: PluginRecord) -> _Record:
    declarations = tuple(
        (type(item).__name__, msgspec.Raw(msgspec.msgpack.encode(item))) for item in record.declarations
    )
    return _Record(
        record.group, record.key, record.dist, record.version, record.entry_point, record.status, record.reason,
        record.milliseconds, declarations,
    )  # fmt: skip


def _restored(record: _Record) -> PluginRecord:
    declarations = tuple(
        _hashable(msgspec.msgpack.decode(data, type=_KINDS[kind])) for kind, data in record.declarations
    )
    return PluginRecord(
        record.group, record.key, record.dist, record.version, record.entry_point, record.status, record.reason,
        record.milliseconds, declarations,
    )  # fmt: skip


def _hashable(declaration: Declaration) -> Declaration:
    """With tuples in place of lists, as plugins write them."""
    lists = {name: tuple(value) for name, value in _items(declaration) if isinstance(value, list)}
    return replace(declaration, **lists) if lists else declaration


def _items(declaration: Declaration) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(declaration, field.name)) for field in fields(declaration))


def _folders(registry: Registry) -> set[str]:
    """Where the packages lie that plugins, and what they name as ``module:attr``, kernel roots or presets, are in."""
    names = {record.entry_point.partition(":")[0].partition(".")[0] for record in registry.records}
    names |= {root.package.partition(".")[0] for root in registry.kernel_roots()}
    for record in registry.records:
        for declaration in record.declarations:
            for name, value in _items(declaration):
                found = _TARGET.fullmatch(value) if isinstance(value, str) else None
                if found or name == "presets":
                    names.add(found[1] if found else value.partition(".")[0])
    specs = [find_spec(name) for name in sorted(filter(None, names))]
    return {folder for spec in specs if spec is not None for folder in _places(spec)}


def _places(spec: Any) -> list[str]:
    """The folders of a package, or the file of a module by itself."""
    return list(spec.submodule_search_locations or filter(None, [spec.origin]))
