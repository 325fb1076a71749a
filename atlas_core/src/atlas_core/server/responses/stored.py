"""What is kept of responses: read, deleted, cancelled; and the tokens that one would take."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server.body import parse_object, read_body
from atlas_core.server.boundary import json_response
from atlas_core.server.endpoint import Shared
from atlas_core.server.responses.answer import ENDED
from atlas_core.server.responses.context import gather
from atlas_core.server.responses.endpoint import new_id, prepare
from atlas_core.server.responses.following import LoggedEvents
from atlas_core.server.responses.items import invalid
from atlas_core.server.responses.jobs import Jobs
from atlas_core.server.responses.schema import UNSUPPORTED, WITHOUT_EFFECT, InputRequest, ResponsesRequest
from atlas_core.server.responses.tools import read_tools
from atlas_core.server.schema import read_request, unknown_fields
from atlas_core.server.store.owner import owner_of
from atlas_core.server.store.paging import page
from atlas_core.server.store.port import Record, Store
from atlas_core.vocab.errors import RequestError

_LOST = {
    "code": "server_error",
    "message": "the server was stopped while it made this response (send the request again)",
}


class StoredResponses:
    """The endpoints below ``/v1/responses``."""

    def __init__(self, shared: Shared, store: Store, jobs: Jobs) -> None:
        self._shared = shared
        self._store = store
        self._jobs = jobs

    async def retrieve(self, request: Request) -> Response:
        """The response; with ``stream=true`` its events, from the one behind ``starting_after`` on. Raises RequestError."""
        owner, asked = owner_of(request.scope), request.path_params["id"]
        stream = request.query_params.get("stream", "false").lower()
        if stream not in ("true", "false"):
            raise invalid("stream", "it is neither true nor false")
        if stream == "false":
            return json_response(await self._current(owner, asked))
        await self._record(owner, asked)
        job = self._jobs.find(owner, asked)
        if job is None or job.log is None:
            raise RequestError(
                "the events of this response are not kept",
                "that is so for responses made with background and stream, while they are made and for a while", "ask without stream",
                field="stream", code="stream_not_available",
            )  # fmt: skip
        after = request.query_params.get("starting_after", "-1")
        if not (after == "-1" or (after.isascii() and after.isdecimal() and len(after) < 10)):
            raise invalid("starting_after", "it is no number of an event")
        return LoggedEvents(job.log, int(after) + 1, self._shared.options.ping_interval)

    async def delete(self, request: Request) -> Response:
        """Forget the response; one that is being made is cancelled first. Raises RequestError."""
        owner, asked = owner_of(request.scope), request.path_params["id"]
        await self._record(owner, asked)
        job = self._jobs.running(owner, asked)
        if job is not None:
            await job.stop()
        self._jobs.forget(owner, asked)
        await self._store.delete(owner, "response", asked)
        return json_response({"id": asked, "object": "response.deleted", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response that is made in the background; one that has ended already is given as it is. Raises RequestError."""
        owner, asked = owner_of(request.scope), request.path_params["id"]
        record = await self._record(owner, asked)
        if not record.body["background"]:
            raise RequestError(
                "the response cannot be cancelled", "only those that are made in the background can", "close the connection instead",
                field="id", code="response_not_cancellable",
            )  # fmt: skip
        job = self._jobs.running(owner, asked)
        if job is not None:
            await job.stop()
        return json_response(await self._current(owner, asked))

    async def input_items(self, request: Request) -> Response:
        """A page of the items that the response answers, those of earlier turns included. Raises RequestError."""
        record = await self._record(owner_of(request.scope), request.path_params["id"])
        return json_response(page(record.items[: record.inputs], request.query_params))

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a response would have. Raises RequestError as the response would."""
        service = self._shared.lifecycle.service()
        body = parse_object(await read_body(request.headers, request.stream(), self._shared.options.max_body))
        asked = read_request(InputRequest, body, UNSUPPORTED)
        known = {*UNSUPPORTED, *WITHOUT_EFFECT, *ResponsesRequest.__struct_fields__}
        self._shared.unknown.tell(unknown_fields(InputRequest, body, known))
        tools = read_tools(asked.tools or ())
        context = await gather(self._store, owner_of(request.scope), asked, new_id)
        self._shared.unknown.tell([*tools.skipped, *context.skipped])
        turn = await prepare(self._shared, service, asked, context, tools, self._shared.clock(), request.scope)
        return json_response({"object": "response.input_tokens", "input_tokens": len(turn.prompts[0].ids)})

    async def _record(self, owner: str, asked: str) -> Record:
        record = await self._store.load(owner, "response", asked)
        if record is None:
            raise RequestError(
                f"there is no response {asked[:64]!r}", "it was not stored, was deleted, or is older than what the store keeps", "",
                kind="not_found", field="id", code="response_not_found",
            )  # fmt: skip
        return record

    async def _current(self, owner: str, asked: str) -> Mapping[str, Any]:
        """The object as it stands now, which for a running job is not in the store yet."""
        # The job first: one that ends meanwhile has put its response into the store before.
        job = self._jobs.find(owner, asked)
        record = await self._record(owner, asked)
        if job is not None:
            return job.body
        body = {**record.body, "output": record.items[record.inputs :]}
        return body if record.body["status"] in ENDED else {**body, "status": "failed", "error": _LOST}
