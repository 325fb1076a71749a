"""Read the entry points, import each plugin in a try of its own, and ask its hooks once.

Each plugin is alone with the pluggy manager while it is asked: a call then reaches one plugin, so whatever fails has one name, and a
broken plugin cannot keep the others from being asked.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, time_ns
from typing import Any

import pluggy
from msgspec.structs import replace

from atlas_core import hookspecs
from atlas_core.contracts import API_VERSION
from atlas_core.contracts.declarations import Declaration, GpuBackendDecl
from atlas_core.plugins.identity import Identity, identity
from atlas_core.plugins.installed import Point, points
from atlas_core.plugins.registry import GROUPS, PluginRecord, Registry, Status, canonical, key_of
from atlas_core.vocab.errors import PluginError

Trace = Callable[[str], None]

_CORE = "atlas-core"


def discover(allow: Sequence[str] | None = None, trace: Trace | None = None) -> Registry:
    """Everything that is installed and sound, as a Registry.

    ``allow`` and ``trace`` are as for ``survey``. Raises PluginError when two distributions offer one key.
    """
    began = time_ns()
    return replace(Registry.of(survey(allow, trace)), began=began)


def survey(allow: Sequence[str] | None = None, trace: Trace | None = None) -> tuple[PluginRecord, ...]:
    """A record of every entry point of the four groups, sorted by group, key and distribution.

    ``allow`` names the distributions or keys to load (None: all); what it leaves out is not imported, and core's own built-ins
    are always loaded. ``trace`` gets a line before and after each hook call, and the traceback of whatever failed. No fault of a
    plugin raises: it is in the record. Raises PluginError when ``allow`` names something that is not installed.
    """
    found = points(GROUPS)
    if allow is not None:
        _check_allowed(allow, found)
    order = list(GROUPS)
    found.sort(key=lambda point: (order.index(point.group), point.key, _owner(point)))
    manager = _Manager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return tuple(_examine(manager, point, allow, trace) for point in found)


def installed() -> Identity:
    """Every distribution with an entry point of the four groups, sound or not; nothing is imported."""
    return identity((_owner(point), point.version or "unknown", point.module) for point in points(GROUPS))


def _owner(point: Point) -> str:
    """The distribution's name. Without one it is a damaged installation: the record will say so."""
    return point.dist or f"(the distribution of {point.module})"


def _names(point: Point) -> set[str]:
    """What the allow-list may call it."""
    return {_normal(_owner(point)), _normal(point.key)}


class _Manager(pluggy.PluginManager):
    """Does not look for hooks among what every object has."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> "pluggy.HookimplOpts | None":
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)


def compatible(api: str, host: str = API_VERSION) -> str:
    """Why contracts of version ``api`` cannot be used with ``host``; empty when they can (same major, host's minor not older)."""
    wanted, offered = (re.fullmatch(r"(\d+)\.(\d+)", version, re.ASCII) for version in (api, host))
    if wanted is None or offered is None:
        return f"api {api!r} is not of the form major.minor"
    if wanted[1] != offered[1]:
        return f"it is written for api {api}, this atlas-core speaks {host}: the major versions differ"
    if int(wanted[2]) > int(offered[2]):
        return f"it needs api {api}, this atlas-core speaks {host}: upgrade atlas-core"
    return ""


def _check_allowed(allow: Sequence[str], found: Sequence[Point]) -> None:
    known = {name for point in found for name in _names(point)}
    missing = [name for name in allow if _normal(name) not in known]
    if missing:
        raise PluginError(
            f"ATLAS_PLUGINS names {', '.join(map(repr, missing))}, which no installed distribution offers",
            f"installed: {', '.join(sorted({_owner(point) for point in found}))}",
            "install it, or take it off the list",
        )


def _examine(
    manager: pluggy.PluginManager, point: Point, allow: Sequence[str] | None, trace: Trace | None
) -> PluginRecord:
    record = PluginRecord(point.group, point.key, _owner(point), point.version or "unknown", point.value, "ok", "", 0.0)
    if point.version is None:
        return replace(record, status="broken", reason="its distribution has no readable metadata; reinstall it")
    if allow is not None and not _names(point) & {_CORE, *map(_normal, allow)}:
        return replace(record, status="excluded", reason="ATLAS_PLUGINS does not name it")
    declarations: tuple[Declaration, ...] = ()
    reason = ""
    start = perf_counter()
    try:
        declarations = tuple(_declarations(manager, point, trace))
    except _UnsoundError as error:
        reason = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001  third-party code may raise anything; it becomes the record's reason
        reason = f"{type(error).__name__}: {error}"
        if trace:
            import traceback  # to trace one, and never otherwise

            trace(traceback.format_exc())
    elapsed = (perf_counter() - start) * 1000
    status: Status = "broken" if reason else "ok"
    return replace(record, status=status, reason=reason, milliseconds=elapsed, declarations=declarations)


class _UnsoundError(Exception):
    """A plugin that breaks a rule of registration; its text is the record's reason."""


def _declarations(manager: pluggy.PluginManager, point: Point, trace: Trace | None) -> Iterator[Declaration]:
    if point.key != canonical(point.key):
        raise _UnsoundError(f"its key is spelt {point.key!r}, the canonical spelling is {canonical(point.key)!r}")
    plugin = point.load()
    name = f"{_owner(point)}:{point.key}"
    manager.register(plugin, name)
    try:
        manager.check_pending()
        undo = _traced(manager, name, trace) if trace else None
        try:
            yield from _asked(manager, plugin, point)
        finally:
            if undo:
                undo()
    finally:
        manager.unregister(name=name)


def _traced(manager: pluggy.PluginManager, name: str, trace: Trace) -> Callable[[], None]:
    return manager.add_hookcall_monitoring(
        before=lambda hook, _impls, _args: trace(f"{name}: asking {hook}"),
        after=lambda outcome, hook, _impls, _args: trace(f"{name}: {hook} gave {_told(outcome)}"),
    )


def _asked(manager: pluggy.PluginManager, plugin: object, point: Point) -> Iterator[Declaration]:
    hooks = GROUPS[point.group]
    implemented = [hook.name for hook in manager.get_hookcallers(plugin) or ()]
    foreign = sorted(set(implemented) - set(hooks))
    if foreign:
        raise _UnsoundError(f"a plugin of {point.group} may not implement {', '.join(foreign)}")
    if not implemented:
        raise _UnsoundError(f"it implements none of {', '.join(hooks)}")
    for hook in sorted(implemented):
        for declaration in getattr(manager.hook, hook)() or [None]:
            yield _checked(declaration, hook, hooks[hook], point)


def _checked(found: Any, hook: str, kind: type[Declaration], point: Point) -> Declaration:
    if not isinstance(found, kind):
        raise _UnsoundError(f"{hook} returned {found!r}, not a {kind.__name__}")
    problem = compatible(found.api)
    if problem:
        raise _UnsoundError(problem)
    # A machine's plugin may also bring a toolchain or a transport, which are named after the vendor.
    if (point.group != "atlas.hardware" or isinstance(found, GpuBackendDecl)) and key_of(found) != point.key:
        raise _UnsoundError(f"{hook} declares {key_of(found)!r}, but its entry point is named {point.key!r}")
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _told(outcome: pluggy.Result[Any]) -> str:
    return (
        f"{type(outcome.exception).__name__}: {outcome.exception}" if outcome.exception else repr(outcome.get_result())
    )
