"""``manifest.json`` beside the binaries: what was built of what, so that use, rebuild and packaging need not guess."""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from atlas_core.kernels.manifest import parse_param
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Param

MANIFEST = "manifest.json"
FORMAT = 1
_REBUILD = "Delete the folder and run atlas kernels build."


class CompiledEntry(Struct, frozen=True):
    """One entry of a binary: registers and spilled bytes a thread, bytes of static shared memory; None: not told."""

    params: tuple[Param, ...]
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None


class CompiledModule(Struct, frozen=True):
    """One binary. ``files`` is its closure: SHA-256 by ``package:path``; keys are those of ``kernels.closure``."""

    file: str
    sha256: str
    source: str
    origin: str
    source_key: str
    key: str
    compiler: str
    flags: tuple[str, ...]
    defines: tuple[tuple[str, str], ...]
    files: Mapping[str, str]
    entries: Mapping[str, CompiledEntry]


class CompiledLayer(Struct, frozen=True):
    """All binaries of one layer for one architecture; ``declarations`` are the TOML files behind it, by SHA-256."""

    hardware: str
    arch: str
    layer: str
    declarations: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, CompiledModule] = field(default_factory=dict)


def _entry_json(entry: CompiledEntry) -> dict[str, Any]:
    return {
        "params": [str(param) for param in entry.params],
        "registers": entry.registers,
        "spills": entry.spills,
        "shared": entry.shared,
    }


def dump(layer: CompiledLayer) -> str:
    """JSON text with sorted keys: equal layers give equal bytes."""
    modules = {
        name: {
            "file": module.file,
            "sha256": module.sha256,
            "source": module.source,
            "origin": module.origin,
            "source_key": module.source_key,
            "key": module.key,
            "compiler": module.compiler,
            "flags": list(module.flags),
            "defines": dict(module.defines),
            "files": dict(module.files),
            "entries": {entry: _entry_json(value) for entry, value in module.entries.items()},
        }
        for name, module in layer.modules.items()
    }
    content = {
        "format": FORMAT,
        "hardware": layer.hardware,
        "arch": layer.arch,
        "layer": layer.layer,
        "declarations": dict(layer.declarations),
        "modules": modules,
    }
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def load(text: str, where: str) -> CompiledLayer:
    """Read what ``dump`` wrote. Raises KernelError for anything else; rebuilding is the cure."""
    try:
        data = json.loads(text)
        written = data["format"]
        modules = {name: _module(value) for name, value in data["modules"].items()} if written == FORMAT else {}
        layer = CompiledLayer(data["hardware"], data["arch"], data["layer"], dict(data["declarations"]), modules)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KernelError(f"{where} cannot be read: {error!r}", cure=_REBUILD) from error
    if written != FORMAT:
        raise KernelError(f"{where} has format {written}", f"This Atlas writes {FORMAT}.", _REBUILD)
    return layer


def _module(data: dict[str, Any]) -> CompiledModule:
    entries = {
        name: CompiledEntry(
            tuple(map(parse_param, value["params"])), value["registers"], value["spills"], value["shared"]
        )
        for name, value in data["entries"].items()
    }
    return CompiledModule(
        data["file"],
        data["sha256"],
        data["source"],
        data["origin"],
        data["source_key"],
        data["key"],
        data["compiler"],
        tuple(data["flags"]),
        tuple(sorted(data["defines"].items())),
        dict(data["files"]),
        entries,
    )
