"""How many sequences may be inside at once: those that run and those that wait. Any further one is refused at once."""

import asyncio
from collections.abc import Callable, Iterator
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
    def enter(self, count: int, capacity: int) -> Iterator["Places"]:
        """Take ``count`` places, all of which are free again at the end.

        Raises RequestError: overloaded when there is no room now, invalid when there never is.
        """
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
        self._change(count)
        places = Places(count, self._change)
        try:
            yield places
        finally:
            places.free(places.left)

    async def emptied(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()

    def _change(self, count: int) -> None:
        self._inside += count
        if self._inside:
            self._empty.clear()
        else:
            self._empty.set()


class Places:
    """Places of one request.

    Each is given back when its sequence is done, before the client can know: its next request may follow at once and must find room.
    """

    def __init__(self, count: int, change: Callable[[int], None]) -> None:
        self.left = count
        self._change = change

    def free(self, count: int = 1) -> None:
        """Give ``count`` places back."""
        self.left -= count
        self._change(-count)
