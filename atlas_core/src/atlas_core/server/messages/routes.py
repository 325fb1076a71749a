"""The routes of this face."""

from http import HTTPStatus

from atlas_core.server.endpoint import Generation, Shared
from atlas_core.server.errors import ANTHROPIC
from atlas_core.server.messages import shapes
from atlas_core.server.messages.count import TokenCount
from atlas_core.server.messages.face import Messages
from atlas_core.server.messages.schema import CountRequest, MessagesRequest
from atlas_core.server.routes import Operation

_EXAMPLE = {"model": "any", "messages": [{"role": "user", "content": "What is gravity?"}]}


def operations(shared: Shared) -> list[Operation]:
    """To answer, and to count."""
    return [
        Operation(
            path="/v1/messages", method="POST", endpoint=Generation(Messages(), shared), summary="Answer a conversation",
            tag="Messages", body=MessagesRequest, example=_EXAMPLE | {"max_tokens": 16}, answer=shapes.Message,
            events=shapes.Event, errors=ANTHROPIC,
            statuses=frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS}),
        ),
        Operation(
            path="/v1/messages/count_tokens", method="POST", endpoint=TokenCount(shared).count,
            summary="Count the tokens of a conversation", tag="Messages", body=CountRequest, example=_EXAMPLE,
            answer=shapes.Counted,
            errors=ANTHROPIC, statuses=frozenset({HTTPStatus.NOT_FOUND}),
        ),
    ]  # fmt: skip
