"""Keeps what users wrote from becoming control tokens, whatever the template does with it.

Before rendering, every spelling of a special token in a message is broken by a mark that occurs nowhere in the conversation. After rendering, the broken
spellings are the user's and are encoded as ordinary characters; the whole ones are the template's and are control tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from atlas_core.vocab.errors import RequestError

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: no text interchange needs them


class Guard:
    """One conversation's guard. ``special`` are the spellings of the special tokens, each of two or more characters."""

    def __init__(self, special: Iterable[str], messages: Any) -> None:
        """Choose a mark. Raises RequestError when the messages hold all thirty-two noncharacters that could serve."""
        used = set().union(*(set(_MARKS) & set(text) for text in _strings(messages)), ())
        free = [mark for mark in _MARKS if mark not in used]
        if not free:
            raise RequestError(
                "the messages hold every Unicode noncharacter from U+FDD0 to U+FDEF",
                "one of them is needed to keep user text apart from control tokens",
                "take one out",
                field="messages",
            )
        self._mark = free[0]
        # Longest first: of two spellings that begin alike the whole one is meant.
        spellings = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._plain = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._broken = re.compile("|".join(re.escape(self._break(text)) for text in spellings)) if spellings else None

    def conceal(self, value: Any) -> Any:
        """``value`` with every special spelling in every string broken; mappings' keys included."""
        if isinstance(value, str):
            return value if self._plain is None else self._plain.sub(lambda found: self._break(found[0]), value)
        if isinstance(value, Mapping):
            return {self.conceal(key): self.conceal(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.conceal(item) for item in value]
        return value

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """(text, whether special tokens in it are meant) in order; texts are free of the mark and never empty."""
        start = 0
        for found in self._broken.finditer(rendered) if self._broken else ():
            if found.start() > start:
                yield rendered[start : found.start()].replace(self._mark, ""), True
            yield found[0].replace(self._mark, ""), False
            start = found.end()
        if start < len(rendered):
            yield rendered[start:].replace(self._mark, ""), True

    def _break(self, spelling: str) -> str:
        return spelling[0] + self._mark + spelling[1:]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _strings(item)
