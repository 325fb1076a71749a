"""The Store port: records of items, each belonging to one owner, whom nobody else's requests can see."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

Item = Mapping[str, Any]
"""An item as the protocol has it; JSON values only, with its ``id``."""

Kind = Literal["response", "conversation"]


class Record(Struct, frozen=True):
    """A response or a conversation.

    ``created`` is Unix time, seconds. ``body`` are JSON values. A conversation's ``items`` are its own; those of a response are
    first what it answers (``inputs`` of them, earlier turns included), then what it answered.
    """

    id: str
    kind: Kind
    created: int
    body: Mapping[str, Any]
    items: tuple[Item, ...] = ()
    inputs: int = 0


class StoreLimits(Struct, frozen=True):
    """``entries`` records and ``size`` bytes at most, the oldest going first; none is kept ``retention`` seconds after its last change."""

    entries: int = 10_000
    size: int = 256 * 2**20
    retention: float = 30 * 86_400.0


class Store(Protocol):
    """Keeps records; never blocks the event loop. All ids are looked up among those of ``owner`` only.

    Every method raises AtlasError when the medium fails. Whatever is written survives as long as the medium does, unless limits evict it.
    """

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything at all."""
        ...

    async def save(self, owner: str, record: Record) -> None:
        """Keep ``record``, in place of one of the same id. Raises RequestError of kind too_large when it can never fit."""
        ...

    async def load(self, owner: str, kind: Kind, id: str) -> Record | None:  # noqa: A002 the word for it
        """The record, or None when there is none (any more)."""
        ...

    async def delete(self, owner: str, kind: Kind, id: str) -> bool:  # noqa: A002
        """Forget the record; whether there was one."""
        ...

    async def append(self, owner: str, id: str, items: Sequence[Item]) -> bool:  # noqa: A002
        """Put ``items`` behind those of a conversation; False when it is not there. Raises RequestError as ``save`` does."""
        ...

    async def remove(self, owner: str, id: str, item_id: str) -> bool:  # noqa: A002
        """Take one item out of a conversation; whether it was there."""
        ...

    async def rewrite(self, owner: str, id: str, body: Mapping[str, Any]) -> bool:  # noqa: A002
        """Give a conversation another body; False when it is not there."""
        ...

    async def item(self, owner: str, item_id: str) -> Item | None:
        """An item of any record, by its id; the latest one where several have it."""
        ...

    async def close(self) -> None:
        """Finish what is being written; nothing may be asked afterwards. Safe to call twice."""
        ...
