"""What tokens are spelt like, and the reverse."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol


class Vocabulary(Protocol):
    """Every token of a tokenizer, added ones included."""

    @property
    def size(self) -> int:
        """One more than the largest number; not every smaller one need have a token."""
        ...

    def spelling(self, number: int) -> str | None:
        """How a token is spelt; None where there is none."""
        ...

    def number(self, spelling: str) -> int | None:
        """The token that is spelt so."""
        ...


class Mapped:
    """A vocabulary that came as numbers by spelling."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._spellings = {number: spelling for spelling, number in ids.items()}
        self.size = max(self._spellings, default=-1) + 1

    def spelling(self, number: int) -> str | None:
        """See Vocabulary."""
        return self._spellings.get(number)

    def number(self, spelling: str) -> int | None:
        """See Vocabulary."""
        return self._ids.get(spelling)


class Listed:
    """A vocabulary that came in the order of its numbers; a token is looked at when it is asked for.

    Those that are in ``known`` are found by their spelling; asking for another makes an index of all.
    """

    def __init__(self, tokens: Sequence[str], known: Mapping[int, str]) -> None:
        self._tokens = tokens
        self._known = {spelling: number for number, spelling in known.items()}
        self.size = len(tokens)

    def spelling(self, number: int) -> str | None:
        """See Vocabulary."""
        return self._tokens[number] if 0 <= number < len(self._tokens) else None

    def number(self, spelling: str) -> int | None:
        """See Vocabulary."""
        found = self._known.get(spelling)
        return self._index.get(spelling) if found is None else found

    @cached_property
    def _index(self) -> Mapping[str, int]:
        return {token: number for number, token in enumerate(self._tokens)}
