"""Pages of a list of items. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_core.server.store.port import Item
from atlas_core.vocab.errors import RequestError

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """The ``list`` object for ``query``: ``limit`` (1 to 100), ``order`` (desc unless given) and ``after``, the id to go on behind.

    ``has_more`` is whether anything follows in this order. Raises RequestError that names the parameter.
    """
    limit, order, after = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise _invalid("limit", f"it is no whole number from 1 to {MAX_LIMIT}")
    if order not in ("asc", "desc"):
        raise _invalid("order", "it is neither asc nor desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise _invalid("after", f"there is no item {after[:64]!r} in this list")
        start = places[0] + 1
    data = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + len(data) < len(ordered),
    }


def _invalid(field: str, why: str) -> RequestError:
    return RequestError(f"{field} is not valid", why, "", field=field, code="invalid_value")
