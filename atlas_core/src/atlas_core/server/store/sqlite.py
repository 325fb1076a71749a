"""A store in an SQLite file, on a thread of its own."""

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from atlas_core.server.store.database import Database, failed
from atlas_core.server.store.port import Item, Kind, Record

T = TypeVar("T")


class SqliteStore:
    """Everything that ``database`` does happens on one thread, in the order in which it was asked for."""

    keeps = True

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, "atlas-store")
        self._closed = False

    async def save(self, owner: str, record: Record) -> None:
        """See the port."""
        await self._do(lambda: self._database.save(owner, record))

    async def load(self, owner: str, kind: Kind, id: str) -> Record | None:  # noqa: A002
        """See the port."""
        return await self._do(lambda: self._database.load(owner, kind, id))

    async def delete(self, owner: str, kind: Kind, id: str) -> bool:  # noqa: A002
        """See the port."""
        return await self._do(lambda: self._database.delete(owner, kind, id))

    async def append(self, owner: str, id: str, items: Sequence[Item]) -> bool:  # noqa: A002
        """See the port."""
        return await self._do(lambda: self._database.append(owner, id, items))

    async def remove(self, owner: str, id: str, item_id: str) -> bool:  # noqa: A002
        """See the port."""
        return await self._do(lambda: self._database.remove(owner, id, item_id))

    async def rewrite(self, owner: str, id: str, body: Mapping[str, Any]) -> bool:  # noqa: A002
        """See the port."""
        return await self._do(lambda: self._database.rewrite(owner, id, body))

    async def item(self, owner: str, item_id: str) -> Item | None:
        """See the port."""
        return await self._do(lambda: self._database.item(owner, item_id))

    async def close(self) -> None:
        """See the port."""
        if not self._closed:
            self._closed = True
            await self._do(self._database.close)
            self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise failed(error) from error
