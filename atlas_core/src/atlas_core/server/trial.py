"""``/health_generate``: whether the engine really answers, shown by one token."""

import uuid
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server import shapes
from atlas_core.server.boundary import json_response, record_of
from atlas_core.server.endpoint import Shared
from atlas_core.server.generation import while_connected
from atlas_core.server.ports import Engine
from atlas_core.server.routes import Operation
from atlas_core.vocab.errors import EngineError
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams


class Trial:
    """Runs the shortest request there is. Unlike /health it costs a place, and so asks for a key and counts as a request."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def operations(self) -> list[Operation]:
        """The route."""
        return [
            Operation(
                path="/health_generate", endpoint=self.generate, summary="Whether one token can be generated", tag="Server",
                answer=shapes.HealthState, statuses=frozenset({HTTPStatus.TOO_MANY_REQUESTS}),
            ),
        ]  # fmt: skip

    async def generate(self, request: Request) -> Response:
        """200 when a token came. Raises AtlasError when none did."""
        shared = self._shared
        service = shared.lifecycle.service()
        info = service.engine.info
        embeds = bool(info.vector_size)
        params = SamplingParams(temperature=0.0, max_tokens=0 if embeds else 1)
        asked = Generate(f"health-{uuid.uuid4().hex}", (0,), params, shared.clock(), embed=embeds)
        with shared.gate.enter(1, info.max_batch_size + shared.options.max_queue):
            await while_connected(request.receive, _run(service.engine, asked))
        record = record_of(request.scope)
        record.prompt_tokens, record.completion_tokens = 1, params.max_tokens or 0
        return json_response({"status": service.engine.state}, headers={"cache-control": "no-store"})


async def _run(engine: Engine, request: Generate) -> None:
    stream = engine.generate(request)
    try:
        async for delta in stream:
            if delta.finish in ("stop", "length"):
                return
    finally:
        await stream.aclose()
    raise EngineError(
        "the engine ended the request early", "its answer has no end", "send it again", state=engine.state
    )
