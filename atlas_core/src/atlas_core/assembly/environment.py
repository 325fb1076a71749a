"""What the process environment says of plugins and keys. The only place where it is read for them."""

import os
import sys
from collections.abc import Callable, Mapping

from atlas_core.plugins import Registry, discover
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


def _trace(line: str) -> None:
    sys.stderr.write(f"plugins: {line}\n")
    sys.stderr.flush()
