"""What the process environment says of plugins and keys. The only place where it is read for them."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from atlas_core.assembly.kept import installed
from atlas_core.loading.fetch import cache_directory
from atlas_core.plugins import Registry, discover
from atlas_core.settings import Settings
from atlas_core.vocab.errors import UsageError


def discover_plugins(settings: Settings | None = None) -> Registry:
    """Every sound plugin, as ATLAS_PLUGINS and ATLAS_TRACE_PLUGINS allow. Raises as ``plugins.discover`` does.

    With ``settings`` of a start, they may be those that an earlier one has found and kept.
    """
    trace = trace_sink(os.environ)
    folder = None if settings is None or trace else start_folder(settings)
    return (folder and installed.find(folder)) or discover(allow_list(os.environ), trace)


def start_folder(settings: Settings) -> Path | None:
    """Where starts are kept; None where none are."""
    if settings.start_cache == "none":
        return None
    return Path(settings.start_cache).expanduser() if settings.start_cache else cache_directory() / "starts"


def allow_list(environ: Mapping[str, str]) -> list[str] | None:
    """The names in ATLAS_PLUGINS; None when it is unset. Set and empty, it leaves core's built-ins alone."""
    text = environ.get("ATLAS_PLUGINS")
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def trace_sink(environ: Mapping[str, str]) -> Callable[[str], None] | None:
    """Where hook calls are told: standard error when ATLAS_TRACE_PLUGINS is 1, else nowhere. Raises UsageError otherwise."""
    value = environ.get("ATLAS_TRACE_PLUGINS", "0")
    if value not in ("", "0", "1"):
        raise UsageError(f"ATLAS_TRACE_PLUGINS is {value!r}", "it is a switch", "set it to 1 or 0")
    return _trace if value == "1" else None


def client_key(environ: Mapping[str, str] | None = None) -> str | None:
    """The key with which to ask a server: the first in ATLAS_API_KEY, where a server finds those that it accepts."""
    text = (os.environ if environ is None else environ).get("ATLAS_API_KEY", "")
    return text.partition(",")[0].strip() or None


def _trace(line: str) -> None:
    sys.stderr.write(f"plugins: {line}\n")
    sys.stderr.flush()
