"""Turns of conversations: two responses to one of them are made one after the other, since the second answers the first as well."""

import asyncio
from collections.abc import Callable, Hashable


class TurnTaking:
    """Used on the event loop's thread only; remembers a conversation no longer than somebody speaks or waits in it."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    async def wait(self, conversation: Hashable) -> Callable[[], None]:
        """Wait for one's turn, in order of arrival; what is returned ends it, and may be called twice. Cancelled, one leaves the line."""
        line = self._lines.setdefault(conversation, _Line())
        line.people += 1
        try:
            await line.lock.acquire()
        except BaseException:
            self._leave(conversation, line)
            raise
        done = False

        def end() -> None:
            nonlocal done
            if not done:
                done = True
                line.lock.release()
                self._leave(conversation, line)

        return end

    def _leave(self, conversation: Hashable, line: "_Line") -> None:
        line.people -= 1
        if not line.people:
            del self._lines[conversation]


class _Line:
    """Whoever speaks holds ``lock``; ``people`` counts those who wait, too."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.people = 0
