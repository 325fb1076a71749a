"""A store that lasts as long as the process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from atlas_core.server.store.port import Item, Kind, Record, StoreLimits
from atlas_core.vocab.errors import RequestError

_Key = tuple[str, str]
"""Owner and id."""


class _Row(Struct, frozen=True):
    changed: float
    data: bytes
    items: tuple[str, ...]


class MemoryStore:
    """Records in a dict, the least recently changed first. Values are kept encoded: nobody can change them from outside."""

    keeps = True

    def __init__(self, limits: StoreLimits, clock: Callable[[], float]) -> None:
        """``clock`` is Unix time, seconds."""
        self._limits = limits
        self._clock = clock
        self._rows: dict[_Key, _Row] = {}
        self._holders: dict[_Key, dict[_Key, None]] = {}
        """By owner and item: the records that have it, the latest last."""
        self._size = 0

    async def save(self, owner: str, record: Record) -> None:
        """See the port."""
        data = msgspec.json.encode(record)
        check_size(len(data), self._limits)
        key = owner, record.id
        self._drop(key)
        self._rows[key] = row = _Row(self._clock(), data, tuple(item["id"] for item in record.items))
        for name in row.items:
            self._holders.setdefault((owner, name), {})[key] = None
        self._size += len(data)
        self._evict()

    async def load(self, owner: str, kind: Kind, id: str) -> Record | None:  # noqa: A002
        """See the port."""
        self._evict()
        found = self._rows.get((owner, id))
        record = None if found is None else msgspec.json.decode(found.data, type=Record)
        return record if record is not None and record.kind == kind else None

    async def delete(self, owner: str, kind: Kind, id: str) -> bool:  # noqa: A002
        """See the port."""
        there = await self.load(owner, kind, id) is not None
        if there:
            self._drop((owner, id))
        return there

    async def append(self, owner: str, id: str, items: Sequence[Item]) -> bool:  # noqa: A002
        """See the port."""
        record = await self.load(owner, "conversation", id)
        if record is not None:
            await self.save(owner, replace(record, items=(*record.items, *items)))
        return record is not None

    async def remove(self, owner: str, id: str, item_id: str) -> bool:  # noqa: A002
        """See the port."""
        record = await self.load(owner, "conversation", id)
        left = () if record is None else tuple(item for item in record.items if item["id"] != item_id)
        if record is None or len(left) == len(record.items):
            return False
        await self.save(owner, replace(record, items=left))
        return True

    async def rewrite(self, owner: str, id: str, body: Mapping[str, Any]) -> bool:  # noqa: A002
        """See the port."""
        record = await self.load(owner, "conversation", id)
        if record is not None:
            await self.save(owner, replace(record, body=body))
        return record is not None

    async def item(self, owner: str, item_id: str) -> Item | None:
        """See the port."""
        self._evict()
        holders = self._holders.get((owner, item_id))
        if not holders:
            return None
        record = msgspec.json.decode(self._rows[next(reversed(holders))].data, type=Record)
        return next(item for item in record.items if item["id"] == item_id)

    async def close(self) -> None:
        """See the port."""

    def _evict(self) -> None:
        oldest = self._clock() - self._limits.retention
        while self._rows:
            key, row = next(iter(self._rows.items()))
            if row.changed >= oldest and len(self._rows) <= self._limits.entries and self._size <= self._limits.size:
                return
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        row = self._rows.pop(key, None)
        if row is None:
            return
        self._size -= len(row.data)
        for name in set(row.items):
            holders = self._holders[key[0], name]
            del holders[key]
            if not holders:
                del self._holders[key[0], name]


def check_size(size: int, limits: StoreLimits) -> None:
    """Raises RequestError for a record that would not fit into an empty store."""
    if size > limits.size:
        raise RequestError(
            f"the record of {size} bytes cannot be kept", f"the store holds {limits.size} bytes in all",
            "send less, set store to false, or start the server with a larger --store-max-bytes", kind="too_large",
            code="store_full",
        )  # fmt: skip
