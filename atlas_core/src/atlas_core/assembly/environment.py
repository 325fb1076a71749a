"""What the process environment says: which plugins to load, and settings. The only place where it is read for them."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from atlas_core.plugins import Registry, discover
from atlas_core.settings import Settings, read_settings
from atlas_core.vocab.errors import UsageError


def discover_plugins() -> Registry:
    """Every sound plugin, as ATLAS_PLUGINS and ATLAS_TRACE_PLUGINS allow. Raises as ``plugins.discover`` does."""
    return discover(allow_list(os.environ), trace_sink(os.environ))


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


def settings_from_environment(
    flags: Mapping[str, object], environ: Mapping[str, str] | None = None, file: str | None = None
) -> Settings:
    """Settings from ``flags`` (see ``read_settings``), the environment (None: the process's) and a settings file.

    ``file`` is its path (None: ATLAS_CONFIG, if set). Raises UsageError for every mistake, and for a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get("ATLAS_CONFIG")
    if not file:
        return read_settings(flags, environ)
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the settings file {file} cannot be read", str(error), "name a readable TOML file") from error
    return read_settings(flags, environ, text, str(file))


def _trace(line: str) -> None:
    sys.stderr.write(f"plugins: {line}\n")
    sys.stderr.flush()
