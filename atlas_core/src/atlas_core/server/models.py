"""``GET /v1/models``: every name that the model answers to."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server import shapes
from atlas_core.server.boundary import json_response
from atlas_core.server.endpoint import unknown_model
from atlas_core.server.lifecycle import Lifecycle
from atlas_core.server.ports import Service
from atlas_core.server.routes import Operation


class Models:
    """The list, and one entry of it."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def operations(self) -> list[Operation]:
        """The routes."""
        return [
            Operation(
                path="/v1/models", endpoint=self.all, summary="Every name that the model answers to", tag="Models",
                answer=shapes.ModelList,
            ),
            Operation(
                path="/v1/models/{id:path}", endpoint=self.one, summary="One model", tag="Models", answer=shapes.Model,
            ),
        ]  # fmt: skip

    async def all(self, request: Request) -> Response:
        """Every name as a model. Raises EngineError when the model is not ready."""
        service = self._lifecycle.service()
        return json_response({"object": "list", "data": [_entry(service, name) for name in service.model.names]})

    async def one(self, request: Request) -> Response:
        """One model. Raises RequestError of kind not_found for a name that it has not."""
        service = self._lifecycle.service()
        name = request.path_params["id"]
        if name not in service.model.names:
            raise unknown_model(name, service.model)
        return json_response(_entry(service, name))


def _entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "atlas",
        "root": service.model.names[0],
        "parent": None,
        "max_model_len": service.engine.info.max_seq_len,
    }
