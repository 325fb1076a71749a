"""``POST /v1/messages/count_tokens``: the prompt is made as it would be for an answer, and counted."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server.body import parse_object, read_body
from atlas_core.server.boundary import json_response
from atlas_core.server.endpoint import Shared, served_name
from atlas_core.server.messages.face import Messages, read
from atlas_core.server.messages.schema import CountRequest


class TokenCount:
    """Counts what ``input_tokens`` of an answer would be, and its cached part with it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._face = Messages()

    async def count(self, request: Request) -> Response:
        """``{"input_tokens": n}``, also for a prompt that is too long. Raises RequestError that names the field."""
        service = self._shared.lifecycle.service()
        body = parse_object(await read_body(request.headers, request.stream(), self._shared.options.max_body))
        asked, unknown = read(CountRequest, body)
        self._shared.unknown.tell(unknown)
        served_name(service.model, asked.model, strict=self._shared.options.strict_model)
        prompt = await asyncio.to_thread(self._face.prompt, asked, service.model, service.engine.info)
        return json_response({"input_tokens": len(prompt.ids)})
