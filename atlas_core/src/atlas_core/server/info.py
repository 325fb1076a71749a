"""``/server_info``: what this server is, and every setting with where it came from."""

from starlette.requests import Request
from starlette.responses import Response

from atlas_core import __version__
from atlas_core.server import shapes
from atlas_core.server.boundary import json_response
from atlas_core.server.lifecycle import Lifecycle
from atlas_core.server.options import ServerOptions
from atlas_core.server.routes import Operation


class Info:
    """Tells an operator what is in effect."""

    def __init__(self, lifecycle: Lifecycle, options: ServerOptions) -> None:
        self._lifecycle = lifecycle
        self._options = options

    def operations(self) -> list[Operation]:
        """The route."""
        return [
            Operation(
                path="/server_info", endpoint=self.info, summary="Settings with their sources, and the engine's limits",
                tag="Server", answer=shapes.ServerInfo, needs_model=False,
            ),
        ]  # fmt: skip

    async def info(self, request: Request) -> Response:
        """Everything, in any state of the server."""
        service = self._lifecycle.known
        engine = None
        if service is not None:
            info = service.engine.info
            engine = {
                "max_seq_len": info.max_seq_len, "max_batch_size": info.max_batch_size, "vocab_size": info.vocab_size,
                "fingerprint": info.fingerprint, "memory": dict(info.budget),
                "start": {entry.phase: entry.seconds for entry in info.ledger},
            }  # fmt: skip
        settings = self._options.settings
        # What machine and model have decided is known to the engine, and later.
        late = service.engine.info.settings if service is not None else ()
        rows = [*(settings.rows() if settings is not None else ()), *late]
        return json_response(
            {
                "version": __version__,
                "status": self._lifecycle.state,
                "models": list(service.model.names) if service is not None else [],
                "settings": {name: {"value": value, "source": source} for name, value, source in rows},
                "engine": engine,
            }
        )
