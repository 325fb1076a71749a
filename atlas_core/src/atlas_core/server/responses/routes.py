"""The routes of responses and conversations."""

import time
from http import HTTPStatus

from atlas_core.server.conversations.endpoint import (
    ConversationRequest,
    Conversations,
    ItemsRequest,
    MetadataRequest,
)
from atlas_core.server.endpoint import Shared
from atlas_core.server.responses import shapes
from atlas_core.server.responses.endpoint import Responses
from atlas_core.server.responses.jobs import Jobs
from atlas_core.server.responses.schema import InputRequest, ResponsesRequest
from atlas_core.server.responses.stored import StoredResponses
from atlas_core.server.routes import Operation
from atlas_core.server.store.port import Store

_TAG = "Responses"
_GENERATES = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS})
_EXAMPLE = {"input": "What is gravity?"}
_BAD = frozenset({HTTPStatus.BAD_REQUEST})


def operations(shared: Shared, store: Store, jobs: Jobs) -> list[Operation]:
    """All of them."""
    make = Responses(shared, store, jobs, time.time)
    kept = StoredResponses(shared, store, jobs)
    responses = [
        Operation(
            path="/v1/responses", method="POST", endpoint=make, summary="Make a response", tag=_TAG, body=ResponsesRequest,
            example=_EXAMPLE,
            answer=shapes.ResponseObject, events=shapes.ResponseEvent, statuses=_GENERATES,
        ),
        Operation(
            path="/v1/responses/input_tokens", method="POST", endpoint=kept.input_tokens, summary="Count the tokens of an input",
            tag=_TAG, body=InputRequest, example=_EXAMPLE, answer=shapes.InputTokens, statuses=frozenset({HTTPStatus.NOT_FOUND}),
        ),
        Operation(
            path="/v1/responses/{id}", endpoint=kept.retrieve, summary="A response that is kept", tag=_TAG,
            query=shapes.RetrieveQuery, answer=shapes.ResponseObject, events=shapes.ResponseEvent, needs_model=False,
        ),
        Operation(
            path="/v1/responses/{id}", method="DELETE", endpoint=kept.delete, summary="Forget a response", tag=_TAG,
            answer=shapes.Deleted, needs_model=False,
        ),
        Operation(
            path="/v1/responses/{id}/cancel", method="POST", endpoint=kept.cancel, summary="End a response in the background",
            tag=_TAG, answer=shapes.ResponseObject, statuses=_BAD, needs_model=False,
        ),
        Operation(
            path="/v1/responses/{id}/input_items", endpoint=kept.input_items, summary="What a response answers", tag=_TAG,
            query=shapes.PageQuery, answer=shapes.Page, needs_model=False,
        ),
    ]  # fmt: skip
    return [*responses, *_conversations(Conversations(shared, store, time.time))]


def _conversations(endpoint: Conversations) -> list[Operation]:
    tag = "Conversations"
    one, items, item = "/v1/conversations/{id}", "/v1/conversations/{id}/items", "/v1/conversations/{id}/items/{item}"
    return [
        Operation(
            path="/v1/conversations", method="POST", endpoint=endpoint.create, summary="Begin a conversation", tag=tag,
            body=ConversationRequest, body_optional=True, example={"metadata": {"topic": "physics"}}, answer=shapes.ConversationObject, needs_model=False,
        ),
        Operation(
            path=one, endpoint=endpoint.retrieve, summary="A conversation", tag=tag, answer=shapes.ConversationObject,
            needs_model=False,
        ),
        Operation(
            path=one, method="POST", endpoint=endpoint.update, summary="Give a conversation other metadata", tag=tag,
            body=MetadataRequest, example={"metadata": {"topic": "physics"}}, answer=shapes.ConversationObject, needs_model=False,
        ),
        Operation(
            path=one, method="DELETE", endpoint=endpoint.delete, summary="Forget a conversation", tag=tag,
            answer=shapes.Deleted, needs_model=False,
        ),
        Operation(
            path=items, endpoint=endpoint.items, summary="The items of a conversation", tag=tag, query=shapes.PageQuery,
            answer=shapes.Page, needs_model=False,
        ),
        Operation(
            path=items, method="POST", endpoint=endpoint.add_items, summary="Add items to a conversation", tag=tag,
            body=ItemsRequest, example={"items": [{"role": "user", "content": "What is gravity?"}]},
            answer=shapes.Page, needs_model=False,
        ),
        Operation(
            path=item, endpoint=endpoint.item, summary="An item of a conversation", tag=tag, answer=shapes.AnyItem,
            needs_model=False,
        ),
        Operation(
            path=item, method="DELETE", endpoint=endpoint.remove_item, summary="Take an item out of a conversation", tag=tag,
            answer=shapes.ConversationObject, needs_model=False,
        ),
    ]  # fmt: skip
