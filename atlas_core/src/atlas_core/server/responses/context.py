"""What a request goes on with: its own input behind what the store remembers."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from atlas_core.server.responses.answer import ENDED
from atlas_core.server.responses.items import NewId, check_outputs, invalid, read_items
from atlas_core.server.responses.schema import InputRequest
from atlas_core.server.store.port import Item, Store
from atlas_core.vocab.errors import RequestError


class Context(Struct, frozen=True):
    """``items`` is everything to answer, the request's own from ``own`` on; ``conversation`` is the id of the one it belongs to.

    ``skipped`` says what of its items was left out.
    """

    items: tuple[Item, ...]
    own: int
    skipped: tuple[str, ...]
    conversation: str | None = None


async def gather(store: Store, owner: str, request: InputRequest, new_id: NewId) -> Context:
    """The context of ``request``. Raises RequestError for bad items, and for a response, conversation or item that is not there."""
    conversation = conversation_id(request.conversation)
    if conversation is not None and request.previous_response_id is not None:
        raise invalid("conversation", "previous_response_id says already what came before")
    before: tuple[Item, ...] = ()
    if conversation is not None:
        record = await store.load(owner, "conversation", conversation)
        if record is None:
            raise no_conversation(conversation)
        before = record.items
    elif request.previous_response_id is not None:
        before = await _previous(store, owner, request.previous_response_id)
    given, skipped = read_items(request.input or (), "input", new_id, frozenset(item["id"] for item in before))
    own = [await _resolved(store, owner, item, before, index) for index, item in enumerate(given)]
    items = (*before, *(item for item in own if item is not None))
    check_outputs(items, len(before), "input")
    return Context(items, len(before), tuple(skipped), conversation)


def conversation_id(given: str | Mapping[str, Any] | None) -> str | None:
    """The id in the field of that name. Raises RequestError."""
    found = given.get("id") if isinstance(given, Mapping) else given
    if found is None and given is None:
        return None
    if not isinstance(found, str) or not found:
        raise invalid("conversation", "it is neither an id nor an object with one")
    return found


def no_conversation(asked: str) -> RequestError:
    """404 for a conversation that this client has not."""
    return RequestError(
        f"there is no conversation {asked[:64]!r}", "it was never made, was deleted, or is older than what the store keeps", "",
        kind="not_found", field="conversation", code="conversation_not_found",
    )  # fmt: skip


async def _previous(store: Store, owner: str, asked: str) -> tuple[Item, ...]:
    record = await store.load(owner, "response", asked)
    if record is None:
        raise RequestError(
            f"there is no response {asked[:64]!r} to go on from",
            "it was not stored, was deleted, or is older than what the store keeps", "send the whole history as input",
            field="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
    status = record.body["status"]
    if status not in ENDED or status in ("failed", "cancelled"):
        raise invalid("previous_response_id", f"the response is {status}: it has no answer to go on from")
    return record.items


async def _resolved(store: Store, owner: str, item: Item, before: tuple[Item, ...], index: int) -> Item | None:
    """What a reference stands for, None when that is there already; any other item as it is."""
    if item["type"] != "item_reference":
        return item
    if any(other["id"] == item["id"] for other in before):
        return None
    found = await store.item(owner, item["id"])
    if found is None:
        raise RequestError(
            f"there is no item {item['id'][:64]!r}", "it belongs to no response or conversation that is kept",
            "send the item itself", field=f"input[{index}].id", code="item_not_found",
        )  # fmt: skip
    return found
