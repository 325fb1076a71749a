"""From layers of values to Settings: flag > environment > file > model preset > hardware default > built-in."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from atlas_core.settings.options import OPTIONS, OTHER_VARIABLES, Option, Settings
from atlas_core.settings.sources import Level, Source
from atlas_core.vocab.errors import UsageError

_CURE = "atlas serve --help lists every option; flags, ATLAS_* variables and file keys have the same names"
_KUBERNETES_CURE = "Kubernetes sets ATLAS_PORT and its like for a Service named atlas: put enableServiceLinks: false into the pod, or rename the Service"


def read_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], file_text: str = "", file_name: str = "atlas.toml"
) -> Settings:
    """Settings from what the operator said.

    ``flags`` has one text (a sequence of texts for repeatable options) for each flag given, by option name. ``environ`` is the whole
    environment; only ATLAS_* is looked at. ``file_text`` is TOML, its keys option names; ``file_name`` is for messages.
    Raises UsageError with every mistake found: unknown keys and variables with the nearest names, values out of range.
    """
    mistakes: list[str] = []
    chosen: dict[str, tuple[Any, Source]] = {}
    for name, value, source in _file(file_text, file_name, mistakes):
        _take(OPTIONS[name], OPTIONS[name].kind.accept, value, source, chosen, mistakes)
    for name, value, source in _environment(environ, mistakes):
        _take(OPTIONS[name], OPTIONS[name].kind.parse, value, source, chosen, mistakes)
    for name, flag in flags.items():
        option = OPTIONS[name]
        parse = option.kind.accept if option.kind.repeated else option.kind.parse
        _take(option, parse, flag, Source(Level.FLAG, option.flag), chosen, mistakes)
    return _settled(Settings(), chosen, mistakes, _KUBERNETES_CURE if "ATLAS_SERVICE_HOST" in environ else _CURE)


def with_defaults(settings: Settings, values: Mapping[str, object], source: Source) -> Settings:
    """``settings`` with ``values`` (typed as in TOML) wherever the present source is of a lower level than ``source``.

    For what is known only once model and machine are: a model's preset, a machine's serving defaults. Raises UsageError that
    names ``source`` for unknown names and bad values, also for those that would not have been used.
    """
    mistakes: list[str] = []
    chosen: dict[str, tuple[Any, Source]] = {}
    for name, value in values.items():
        if name not in OPTIONS:
            mistakes.append(f"{source.origin}: unknown key {name!r}{_near(name, OPTIONS)}")
            continue
        origin = Source(source.level, f"{source.origin}: {name}")
        _take(OPTIONS[name], OPTIONS[name].kind.accept, value, origin, chosen, mistakes)
    weaker = {name: pair for name, pair in chosen.items() if settings.source(name).level < source.level}
    return _settled(settings, weaker, mistakes, f"correct {source.origin}")


def _file(text: str, name: str, mistakes: list[str]) -> list[tuple[str, object, Source]]:
    if not text:
        return []
    import tomllib  # when there is a file

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        mistakes.append(f"{name} is not TOML: {error}")
        return []
    mistakes += [f"{name}: unknown key {key!r}{_near(key, OPTIONS)}" for key in table if key not in OPTIONS]
    return [(key, value, Source(Level.FILE, f"{name}: {key}")) for key, value in table.items() if key in OPTIONS]


def _environment(environ: Mapping[str, str], mistakes: list[str]) -> list[tuple[str, str, Source]]:
    known = {option.variable: option for option in OPTIONS.values()}
    found = []
    for variable, value in environ.items():
        if variable in known:
            found.append((known[variable].name, value, Source(Level.ENVIRONMENT, variable)))
        elif variable.startswith("ATLAS_") and variable not in OTHER_VARIABLES:
            near = _near(variable, [*known, *OTHER_VARIABLES], "ATLAS_")
            mistakes.append(f"unknown environment variable {variable}{near}")
    return found


def _take(
    option: Option,
    convert: Callable[[Any], Any],
    value: object,
    source: Source,
    chosen: dict[str, tuple[Any, Source]],
    mistakes: list[str],
) -> None:
    try:
        chosen[option.name] = (convert(value), source)
    except ValueError as error:
        shown = "" if option.secret else f", not {value!r}"
        mistakes.append(f"{source.origin} must be {error}{shown}")


def _settled(settings: Settings, chosen: Mapping[str, tuple[Any, Source]], mistakes: list[str], cure: str) -> Settings:
    if len(mistakes) == 1:
        raise UsageError(mistakes[0], cure=cure)
    if mistakes:
        raise UsageError(f"{len(mistakes)} settings are wrong", "; ".join(mistakes), cure)
    values = {name: value for name, (value, _) in chosen.items()}
    sources = dict(settings.sources) | {name: source for name, (_, source) in chosen.items()}
    return replace(settings, **values, sources=tuple(sources.items()))


def _near(name: str, known: Iterable[str], prefix: str = "") -> str:
    from difflib import get_close_matches  # of use to whoever mistyped something alone

    # Compared without a common beginning, which would make every name look near.
    found = get_close_matches(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], n=3)
    return f"; did you mean {' or '.join(prefix + each for each in found)}?" if found else ""
