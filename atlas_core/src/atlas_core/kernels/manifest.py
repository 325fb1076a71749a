"""KERNEL.toml and HARDWARE.toml: text in, frozen declarations out. Unknown keys are errors naming file and key."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args

from msgspec import Struct, field

from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Param, ParamKind

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAM = re.compile(r"(?P<kind>[a-z0-9]+)\s*(?:<(?P<element>[^<>]*)>)?\s+(?P<name>[A-Za-z_][A-Za-z0-9_]*)")
_ELEMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_:]*(?: [A-Za-z_][A-Za-z0-9_:]*)*(?: ?\*(?: ?const)?)*")


class BuildOptions(Struct, frozen=True):
    """Compiler flags, and how many bytes a thread may spill. A bound (None: not stated) comes with its reason."""

    flags: tuple[str, ...] = ()
    max_spill_bytes: int | None = None
    spill_reason: str = ""


class ModuleDecl(Struct, frozen=True):
    """One binary made of one source file, which lies beside the KERNEL.toml."""

    name: str
    source: str
    options: BuildOptions = BuildOptions()


class EntryDecl(Struct, frozen=True):
    """One function that a module offers, with its parameters in order."""

    name: str
    module: str
    params: tuple[Param, ...]


class InstanceDecl(Struct, frozen=True):
    """One more binary of a module's source, compiled with ``defines``; the entries are the same, the module is not."""

    name: str
    module: str
    defines: tuple[tuple[str, str], ...]


class KernelManifest(Struct, frozen=True):
    """One KERNEL.toml. ``shadows`` maps a source's stem, or an instance's name, to the reason for replacing it."""

    build: BuildOptions = BuildOptions()
    modules: tuple[ModuleDecl, ...] = ()
    entries: tuple[EntryDecl, ...] = ()
    instances: tuple[InstanceDecl, ...] = ()
    shadows: Mapping[str, str] = field(default_factory=dict)


class ServingDefault(Struct, frozen=True):
    """A default that a machine proposes for a setting, with the measurement that speaks for it."""

    setting: str
    value: bool | int | float | str | tuple[str, ...]
    evidence: str


class HardwareManifest(Struct, frozen=True):
    """One HARDWARE.toml. Figures are None where they differ from machine to machine (a CPU's core count).

    ``memory_bandwidth_gbps`` is in 1e9 bytes a second, ``memory_gb`` in 1e9 bytes. ``extends`` names the hardware whose
    common kernels are inherited; ``abstract`` hardware exists only to be extended.
    """

    name: str
    vendor: str
    archs: tuple[str, ...]
    extends: str | None = None
    abstract: bool = False
    flags: tuple[str, ...] = ()
    sm_count: int | None = None
    memory_bandwidth_gbps: float | None = None
    memory_type: str = ""
    memory_gb: float | None = None
    defaults: tuple[ServingDefault, ...] = ()


class _Table:
    """A TOML table that must be consumed key by key; what is left over is an error."""

    def __init__(self, file: str, where: str, data: Mapping[str, Any]) -> None:
        self._file = file
        self._where = where
        self._data = dict(data)
        self._known: list[str] = []

    def fail(self, what: str, cure: str) -> KernelError:
        return KernelError(f"{self._file}: {self._where}: {what}", cure=cure)

    def _take(self, key: str) -> Any:
        self._known.append(key)
        return self._data.pop(key, None)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._take(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value.strip():
            raise self.fail(f"{key} must be a non-empty string, found {value!r}", f'Write {key} = "…".')
        return value

    def name(self, key: str) -> str:
        value = self.text(key)
        if not _NAME.fullmatch(value):
            raise self.fail(f"{key} {value!r} is not a name", "Use lower-case letters, digits and underscores.")
        return value

    def flag(self, key: str) -> bool:
        value = self._take(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, found {value!r}", f"Write {key} = true.")
        return value

    def integer(self, key: str) -> int | None:
        value = self._take(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self.fail(f"{key} must be a whole number of at least 0, found {value!r}", f"Write {key} = 132.")
        return value

    def number(self, key: str) -> float | None:
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.fail(f"{key} must be a positive number, found {value!r}", f"Write {key} = 4800.")
        return float(value)

    def strings(self, key: str, *, distinct: bool = False) -> tuple[str, ...]:
        value = self._take(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.fail(f"{key} must be a list of strings, found {value!r}", f'Write {key} = ["…"].')
        if distinct and len(set(value)) != len(value):
            raise self.fail(f"{key} names something twice: {value!r}", "Remove the repetition.")
        return tuple(value)

    def raw(self, key: str) -> Any:
        return self._take(key)

    def table(self, key: str) -> dict[str, Any]:
        value = self._take(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(f"{key} must be a table, found {value!r}", f"Write [{key}].")
        return value

    def tables(self, key: str) -> list["_Table"]:
        value = self._take(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(f"{key} must be an array of tables", f"Write [[{key}]].")
        return [
            _Table(self._file, f"[[{key}]] {item.get('name', f'number {n}')}", item) for n, item in enumerate(value, 1)
        ]

    def child(self, key: str) -> "_Table":
        return _Table(self._file, f"[{key}]", self.table(key))

    def done(self) -> None:
        for key in self._data:
            import difflib  # of use to whoever mistyped something alone

            near = difflib.get_close_matches(key, self._known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(sorted(self._known))}."
            raise self.fail(f"unknown key {key!r}", hint)


def _parse(text: str, file: str) -> _Table:
    import tomllib  # a start that takes what was kept reads none

    try:
        return _Table(file, "top level", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise KernelError(f"{file} is not valid TOML: {error}", cure="Correct the syntax at that place.") from error


@lru_cache(maxsize=4096)
def parse_param(text: str) -> Param:
    """Read ``i32 hidden`` or ``ptr<const float> x``. Raises ValueError that says what is wrong."""
    match = _PARAM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not of the form 'kind name' or 'ptr<type> name'")
    element = match["element"]
    known: tuple[ParamKind, ...] = get_args(ParamKind)
    kind = next((name for name in known if name == match["kind"]), None)
    if kind is None:
        raise ValueError(f"{text!r} has the unknown kind {match['kind']!r}; known: {', '.join(known)}")
    if element is None:
        return Param(kind, match["name"])
    element = " ".join(element.split())
    if kind != "ptr":
        raise ValueError(f"{text!r}: only a ptr has an element type")
    if not _ELEMENT.fullmatch(element):
        raise ValueError(f"{text!r}: {element!r} is not a type that can be written there")
    return Param(kind, match["name"], element)


def _options(table: _Table) -> BuildOptions:
    flags, bound = table.strings("flags"), table.integer("max_spill_bytes")
    reason = table.text("spill_reason", "")
    if bound and not reason:
        raise table.fail(
            f"max_spill_bytes = {bound} has no reason", 'Add spill_reason = "…", or make the kernel not spill.'
        )
    if reason and not bound:
        raise table.fail("spill_reason is given but no spills are allowed", "Remove it, or state max_spill_bytes.")
    return BuildOptions(flags, bound, reason)


def _module(table: _Table) -> ModuleDecl:
    name, source = table.name("name"), table.text("source")
    if "/" in source or "\\" in source:
        raise table.fail(f"source {source!r} is not a file name", "A source lies beside its KERNEL.toml.")
    decl = ModuleDecl(name, source, _options(table))
    table.done()
    return decl


def _entry(table: _Table) -> EntryDecl:
    name, module = table.text("name"), table.name("module")
    if not _IDENTIFIER.fullmatch(name):
        raise table.fail(f"name {name!r} is not an identifier", "Name the function as the source spells it.")
    params = []
    # Not strings(): two parameters of one spelling deserve the message about names below.
    raw = table.raw("params")
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise table.fail(
            f"params must be a list of strings, found {raw!r}", 'Write params = ["ptr<float> x", "i32 n"].'
        )
    for item in raw:
        try:
            params.append(parse_param(item))
        except ValueError as error:
            raise table.fail(
                f"params: {error}", 'Write for example "ptr<const float> x", "i32 hidden" or "f32 eps".'
            ) from error
    names = [param.name for param in params]
    if len(set(names)) != len(names):
        raise table.fail(f"params use a name twice: {', '.join(names)}", "Give each parameter its own name.")
    table.done()
    return EntryDecl(name, module, tuple(params))


def _instance(table: _Table) -> InstanceDecl:
    name, module, raw = table.name("name"), table.name("module"), table.table("defines")
    if not raw:
        raise table.fail("an instance without defines equals its module", "Add defines = { TILE = 128 }.")
    defines = []
    for key, value in sorted(raw.items()):
        if not _IDENTIFIER.fullmatch(key):
            raise table.fail(f"defines: {key!r} is not an identifier", "Name the macro as the source spells it.")
        spelled = str(int(value)) if isinstance(value, bool) else str(value)
        if not isinstance(value, int | str) or not re.fullmatch(r"[A-Za-z0-9_+-]+", spelled):
            raise table.fail(f"defines: {key} = {value!r} is neither a number nor a word", f"Write {key} = 128.")
        defines.append((key, spelled))
    table.done()
    return InstanceDecl(name, module, tuple(defines))


def parse_kernel_manifest(text: str, file: str) -> KernelManifest:
    """Read a KERNEL.toml; ``file`` is named in errors.

    Raises KernelError for whatever is unknown, missing or contradictory.
    """
    top = _parse(text, file)
    build_table = top.child("build")
    build = _options(build_table)
    build_table.done()
    modules = tuple(_module(table) for table in top.tables("module"))
    entries = tuple(_entry(table) for table in top.tables("entry"))
    instances = tuple(_instance(table) for table in top.tables("instance"))
    shadows = top.table("shadows")
    for stem, reason in shadows.items():
        if not isinstance(reason, str) or not reason.strip():
            raise top.fail(
                f"shadows: {stem} has no reason", f'Write {stem} = "why the common kernel does not do here".'
            )
    top.done()
    names = [*(module.name for module in modules), *(instance.name for instance in instances)]
    for name in names:
        if names.count(name) > 1:
            raise top.fail(f"the module {name!r} is declared twice", "Rename or remove one.")
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if (entry.module, entry.name) in seen:
            raise top.fail(f"entry {entry.name!r} of module {entry.module!r} is declared twice", "Remove one.")
        seen.add((entry.module, entry.name))
        if entry.module not in {module.name for module in modules}:
            raise top.fail(
                f"entry {entry.name!r} belongs to module {entry.module!r}, which no [[module]] here declares",
                "Declare the module in this file; instances and shadows inherit entries.",
            )
    for module in modules:
        if not any(entry.module == module.name for entry in entries):
            raise top.fail(f"module {module.name!r} has no entry", f'Add [[entry]] with module = "{module.name}".')
    return KernelManifest(build, modules, entries, instances, dict(shadows))


def _default(top: _Table, setting: str, value: Any, file: str) -> ServingDefault:
    if not isinstance(value, dict):
        raise top.fail(
            f"defaults.{setting} has no evidence", f'Write {setting} = {{ value = {value!r}, evidence = "…" }}.'
        )
    table = _Table(file, f"[defaults] {setting}", value)
    proposed, evidence = table.raw("value"), table.text("evidence")
    table.done()
    if isinstance(proposed, list) and proposed and all(isinstance(item, str) for item in proposed):
        proposed = tuple(proposed)
    if not isinstance(proposed, bool | int | float | str | tuple):
        why = f"value must be a number, a string, a truth value or an array of strings, found {proposed!r}"
        raise table.fail(why, "State one value.")
    return ServingDefault(setting, proposed, evidence)


def parse_hardware_manifest(text: str, file: str) -> HardwareManifest:
    """Read a HARDWARE.toml; ``file`` is named in errors.

    Raises KernelError for whatever is unknown, missing or contradictory.
    """
    top = _parse(text, file)
    table = top.child("hardware")
    manifest = HardwareManifest(
        name=table.name("name"),
        vendor=table.name("vendor"),
        archs=table.strings("archs", distinct=True),
        extends=table.text("extends", "") or None,
        abstract=table.flag("abstract"),
        flags=table.strings("flags"),
        sm_count=table.integer("sm_count"),
        memory_bandwidth_gbps=table.number("memory_bandwidth_gbps"),
        memory_type=table.text("memory_type", ""),
        memory_gb=table.number("memory_gb"),
        defaults=tuple(_default(top, setting, value, file) for setting, value in top.table("defaults").items()),
    )
    table.done()
    top.done()
    if not manifest.archs and not manifest.abstract:
        raise table.fail("archs is empty", "Name the instruction sets to build for, or say abstract = true.")
    return manifest
