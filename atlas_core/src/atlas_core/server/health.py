"""``/health``, ``/live``, ``/version``: whether the server serves, whether it lives, and which one it is."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from atlas_core import __version__
from atlas_core.server import shapes
from atlas_core.server.boundary import LIVENESS, READINESS, json_response
from atlas_core.server.lifecycle import Lifecycle, fault_parts
from atlas_core.server.routes import Operation


class Health:
    """Answers from the lifecycle's state; never asks the engine, so a busy server answers at once."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def operations(self) -> list[Operation]:
        """The routes."""
        probes = (
            (READINESS, self.health, "Whether requests are served"),
            (LIVENESS, self.live, "Whether a restart would not help"),
        )
        return [
            *(
                Operation(
                    path=path, endpoint=endpoint, answer=shapes.HealthState, also={503: shapes.HealthState}, tag="Server",
                    summary=summary if path == paths[0] else "The same, for whom that is its name",
                    open=True, needs_model=False,
                )
                for paths, endpoint, summary in probes
                for path in paths
            ),
            Operation(
                path="/version", endpoint=self.version, summary="The version of Atlas", answer=shapes.Version, tag="Server",
                needs_model=False,
            ),
        ]  # fmt: skip

    async def health(self, request: Request) -> Response:
        """200 when requests are served; else 503: loading with its progress, faulted, draining, gone."""
        state = self._lifecycle.state
        body: dict[str, Any] = {"status": state}
        if state == "loading":
            progress = self._lifecycle.progress
            body["progress"] = {
                "phase": progress.phase, "done": progress.done, "total": progress.total, "note": progress.note,
            }  # fmt: skip
        elif state == "faulted":
            body |= fault_parts(self._lifecycle.fault)
        return json_response(body, 200 if state == "ready" else 503, {"cache-control": "no-store"})

    async def live(self, request: Request) -> Response:
        """200 as long as a restart would not help: while loading, serving and draining."""
        state = self._lifecycle.state
        return json_response(
            {"status": state}, 503 if state in ("faulted", "gone") else 200, {"cache-control": "no-store"}
        )

    async def version(self, request: Request) -> Response:
        """The version of Atlas."""
        return json_response({"version": __version__})
