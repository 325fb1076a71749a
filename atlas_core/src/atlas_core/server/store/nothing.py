"""A store for servers that shall not remember."""

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_core.server.store.port import Item, Kind, Record


class NoStore:
    """Whatever is kept here is gone."""

    keeps = False

    async def save(self, owner: str, record: Record) -> None:
        """Forget it."""

    async def load(self, owner: str, kind: Kind, id: str) -> Record | None:  # noqa: A002
        """Nothing."""
        return None

    async def delete(self, owner: str, kind: Kind, id: str) -> bool:  # noqa: A002
        """It was not there."""
        return False

    async def append(self, owner: str, id: str, items: Sequence[Item]) -> bool:  # noqa: A002
        """There is no conversation."""
        return False

    async def remove(self, owner: str, id: str, item_id: str) -> bool:  # noqa: A002
        """It was not there."""
        return False

    async def rewrite(self, owner: str, id: str, body: Mapping[str, Any]) -> bool:  # noqa: A002
        """There is no conversation."""
        return False

    async def item(self, owner: str, item_id: str) -> Item | None:
        """Nothing."""
        return None

    async def close(self) -> None:
        """Nothing to do."""
