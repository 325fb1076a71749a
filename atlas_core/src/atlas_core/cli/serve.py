"""``atlas serve``: settings in, a server up, an exit code out."""

from pathlib import Path
from typing import Any

import click

from atlas_core.assembly.environment import discover_plugins
from atlas_core.assembly.settings import engine_settings
from atlas_core.cli.console import Console
from atlas_core.cli.options import SectionedCommand, settings_from, settings_options
from atlas_core.engine.child import EngineProcess
from atlas_core.server.listen import bind_socket
from atlas_core.settings import Settings
from atlas_core.vocab.errors import UsageError

_PREPARE = "atlas_core.assembly.prepare:prepare"


@click.command("serve", cls=SectionedCommand)
@settings_options()
def command(**params: Any) -> int:
    """Serve a model over HTTP.

    MODEL is a Hub id, a directory, a .gguf file, or a short name from the catalogue of an installed model plugin. Every option
    may also be given as an ATLAS_* variable, or in a settings file.
    """
    settings = settings_from(params)
    if settings.model is None:
        raise UsageError(
            "no model is given",
            "there is nothing to serve",
            "name one, for example: atlas serve smollm2; or set ATLAS_MODEL",
        )
    # The engine before the server is imported, so that both come up side by side.
    with bind_socket(settings.bind, settings.port) as listener, EngineProcess(_PREPARE, _early(settings)) as engine:
        # Here, so that --help and mistakes in the settings do not wait for the imports of a server.
        from atlas_core.assembly.serve import serve

        return serve(settings, discover_plugins(settings), Console(), engine, listener)


def _early(settings: Settings) -> bytes:
    """What the engine will be told, when no model has to be fetched first."""
    path = Path(settings.model or "").expanduser()
    return engine_settings(settings, path) if path.exists() and settings.revision is None else b""
