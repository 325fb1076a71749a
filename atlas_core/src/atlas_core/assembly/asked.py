"""Settings as they were asked for: flags, the process environment and a settings file."""

import os
from collections.abc import Mapping
from pathlib import Path

from atlas_core.settings import Settings, read_settings
from atlas_core.vocab.errors import UsageError


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
