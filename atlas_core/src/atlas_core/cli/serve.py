"""``atlas serve``: settings in, a server up, an exit code out."""

from typing import Any

import click

from atlas_core.assembly.environment import discover_plugins
from atlas_core.cli.console import Console
from atlas_core.cli.options import SectionedCommand, settings_from, settings_options
from atlas_core.engine.child import EngineProcess
from atlas_core.vocab.errors import UsageError

_PREPARE = "atlas_core.assembly.engine:prepare"


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
    # First, so that the engine's imports and the server's go on side by side.
    with EngineProcess(_PREPARE) as engine:
        # Here, so that --help and mistakes in the settings do not wait for the imports of a server.
        from atlas_core.assembly.serve import serve

        return serve(settings, discover_plugins(), Console(), engine)
