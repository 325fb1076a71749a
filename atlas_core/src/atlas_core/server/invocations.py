"""``POST /invocations``: the one path that SageMaker asks at; the body says which endpoint is meant."""

from collections.abc import Iterable

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas_core.server.body import parse_object, read_body
from atlas_core.server.endpoint import Shared
from atlas_core.server.routes import Operation
from atlas_core.vocab.errors import RequestError

_FIELDS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
"""Fields that one endpoint needs and the others do not have."""


class Invocations:
    """An ASGI application that hands a request on to the endpoint whose field its body has."""

    def __init__(self, operations: Iterable[Operation], shared: Shared) -> None:
        """``operations`` has those of chat completions, completions and embeddings."""
        self._shared = shared
        by_path = {each.path: each for each in operations}
        self._meant = {name: by_path[path] for name, path in _FIELDS.items()}
        # As a Route has it: an endpoint may be a function of a request, or an ASGI application.
        self._apps: dict[str, ASGIApp] = {
            name: Route(each.path, each.endpoint, methods=[each.method]).app for name, each in self._meant.items()
        }

    def operation(self) -> Operation:
        """The route, which reads and answers what any of the endpoints does."""
        chat = self._meant["messages"]
        return Operation(
            path="/invocations", method="POST", endpoint=self, summary="Any of them, told by the body", tag="Generation",
            example=chat.example, body=chat.body, answer=chat.answer, events=chat.events, last=chat.last,
            either=tuple(self._meant.values()),
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises RequestError unless the body has one of the fields."""
        self._shared.lifecycle.service()
        http = Request(scope, receive)
        data = await read_body(http.headers, http.stream(), self._shared.options.max_body)
        body = parse_object(data)
        given = [name for name in _FIELDS if body.get(name) is not None]
        if len(given) != 1:
            raise RequestError(
                "it cannot be told what is asked for", f"{len(given)} of messages, prompt and input are given", "send one of them",
                field=given[1] if given else "messages", code="invalid_value",
            )  # fmt: skip
        await self._apps[given[0]](scope, _again(data, receive), send)


def _again(data: bytes, receive: Receive) -> Receive:
    """``receive`` of a request whose body, ``data``, was read already."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": data, "more_body": False}

    return replay
