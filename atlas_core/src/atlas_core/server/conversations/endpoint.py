"""``/v1/conversations`` and the items of each."""

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server.body import parse_object, read_body
from atlas_core.server.boundary import json_response
from atlas_core.server.endpoint import Shared
from atlas_core.server.responses.context import no_conversation
from atlas_core.server.responses.endpoint import new_id
from atlas_core.server.responses.items import check_outputs, invalid, read_items
from atlas_core.server.responses.schema import Metadata
from atlas_core.server.schema import R, read_request, unknown_fields
from atlas_core.server.store.owner import owner_of
from atlas_core.server.store.paging import page
from atlas_core.server.store.port import Item, Record, Store
from atlas_core.vocab.errors import RequestError

MAX_ITEMS = 20
"""Items that one call may add, as OpenAI has it."""

NewItems = Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)]


class ConversationRequest(Struct, kw_only=True):
    """``POST /v1/conversations``."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class MetadataRequest(Struct, kw_only=True):
    """``POST /v1/conversations/{id}``."""

    metadata: Metadata | None


class ItemsRequest(Struct, kw_only=True):
    """``POST /v1/conversations/{id}/items``."""

    items: NewItems


class Conversations:
    """The endpoints; all raise RequestError for what is not there or not valid."""

    def __init__(self, shared: Shared, store: Store, clock: Callable[[], float] = time.time) -> None:
        """``clock`` is Unix time, seconds."""
        self._shared = shared
        self._store = store
        self._clock = clock

    async def create(self, request: Request) -> Response:
        """A new conversation, with ``items`` if there are any; a body is not needed."""
        if not self._store.keeps:
            raise RequestError(
                "this server keeps no conversations", "it was started with --store none", "send the whole history each time",
                kind="unsupported", code="store_off",
            )  # fmt: skip
        asked = await self._read(request, ConversationRequest)
        items = self._items(asked.items or [], ())
        body = {"metadata": asked.metadata or {}}
        record = Record(new_id("conv_"), "conversation", int(self._clock()), body, items)
        await self._store.save(owner_of(request.scope), record)
        return json_response(_object(record))

    async def retrieve(self, request: Request) -> Response:
        """The conversation, without its items."""
        return json_response(_object(await self._record(request)))

    async def update(self, request: Request) -> Response:
        """Other metadata."""
        asked = await self._read(request, MetadataRequest)
        record = await self._record(request)
        body = {"metadata": asked.metadata or {}}
        if not await self._store.rewrite(owner_of(request.scope), record.id, body):
            raise no_conversation(record.id)
        return json_response(_object(record, body))

    async def delete(self, request: Request) -> Response:
        """Forget the conversation. Responses that belong to it stay, as OpenAI has it."""
        asked = request.path_params["id"]
        if not await self._store.delete(owner_of(request.scope), "conversation", asked):
            raise no_conversation(asked)
        return json_response({"id": asked, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        """A page of its items."""
        return json_response(page((await self._record(request)).items, request.query_params))

    async def add_items(self, request: Request) -> Response:
        """Put items behind those that are there; gives them as they are kept."""
        asked = await self._read(request, ItemsRequest)
        record = await self._record(request)
        items = self._items(asked.items, record.items)
        if not await self._store.append(owner_of(request.scope), record.id, items):
            raise no_conversation(record.id)
        listed = page(items, {"limit": str(MAX_ITEMS), "order": "asc"})
        return json_response(listed)

    async def item(self, request: Request) -> Response:
        """One item."""
        record = await self._record(request)
        asked = request.path_params["item"]
        found = next((item for item in record.items if item["id"] == asked), None)
        if found is None:
            raise _no_item(asked)
        return json_response(found)

    async def remove_item(self, request: Request) -> Response:
        """Take one item out; gives the conversation."""
        record = await self._record(request)
        asked = request.path_params["item"]
        if not await self._store.remove(owner_of(request.scope), record.id, asked):
            raise _no_item(asked)
        return json_response(_object(record))

    def _items(self, given: list[dict[str, Any]], before: tuple[Item, ...]) -> tuple[Item, ...]:
        items, skipped = read_items(given, "items", new_id, frozenset(item["id"] for item in before))
        self._shared.unknown.tell(skipped)
        for index, item in enumerate(items):
            if item["type"] == "item_reference":
                raise invalid(f"items[{index}]", "a conversation holds items, not references")
        check_outputs((*before, *items), len(before), "items")
        return tuple(items)

    async def _record(self, request: Request) -> Record:
        asked = request.path_params["id"]
        record = await self._store.load(owner_of(request.scope), "conversation", asked)
        if record is None:
            raise no_conversation(asked)
        return record

    async def _read(self, request: Request, kind: type[R]) -> R:
        data = await read_body(request.headers, request.stream(), self._shared.options.max_body)
        body = parse_object(data or b"{}")
        found = read_request(kind, body, {})
        self._shared.unknown.tell(unknown_fields(kind, body))
        return found


def _object(record: Record, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"id": record.id, "object": "conversation", "created_at": record.created, **(body or record.body)}


def _no_item(asked: str) -> RequestError:
    return RequestError(
        f"there is no item {asked[:64]!r} in this conversation",
        "",
        "",
        kind="not_found",
        field="item_id",
        code="item_not_found",
    )
