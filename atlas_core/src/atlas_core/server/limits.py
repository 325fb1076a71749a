"""How many sequences may be inside at once: those that run and those that wait. Any further one is refused at once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from atlas_core.vocab.errors import RequestError


class Gate:
    """Counts sequences that are inside; used on the event loop's thread only."""

    def __init__(self) -> None:
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def inside(self) -> int:
        """How many sequences are inside now."""
        return self._inside

    @contextmanager
    def enter(self, count: int, capacity: int) -> Iterator[None]:
        """Be inside with ``count`` sequences. Raises RequestError: overloaded when there is no room now, invalid when never."""
        if count > capacity:
            raise RequestError(
                f"the request asks for {count} sequences at once", f"this server takes {capacity}", "ask for fewer",
                field="n", code="too_many_sequences",
            )  # fmt: skip
        if self._inside + count > capacity:
            raise RequestError(
                "the server is at its limit", f"{self._inside} sequences run or wait, and {capacity} may",
                "try again later", kind="overloaded",
            )  # fmt: skip
        self._inside += count
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= count
            if self._inside == 0:
                self._empty.set()

    async def emptied(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()
