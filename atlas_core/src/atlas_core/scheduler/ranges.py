"""Consecutive units of a fixed store: slots, penalty rows, pairs of the bias region."""

from collections.abc import Iterable
from itertools import pairwise

from atlas_core.vocab.errors import EngineError


class RangePool:
    """Hands out runs of consecutive units, first fit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._runs: list[tuple[int, int]] = []

    def allocate(self, count: int) -> int | None:
        """The start of ``count`` consecutive free units, or None when there is no such run now."""
        start = 0
        for place, (begin, length) in enumerate(self._runs):
            if start + count <= begin:
                self._runs.insert(place, (start, count))
                return start
            start = begin + length
        if start + count > self.size:
            return None
        self._runs.append((start, count))
        return start

    def release(self, start: int, count: int) -> None:
        """Give back exactly what ``allocate`` gave. Raises EngineError for anything else."""
        try:
            self._runs.remove((start, count))
        except ValueError:
            raise EngineError(f"units {start} to {start + count - 1} were not handed out as one run") from None

    @property
    def used(self) -> int:
        """Units in use."""
        return sum(length for _, length in self._runs)

    def check_integrity(self, held: Iterable[tuple[int, int]]) -> None:
        """Compare with the runs that all holders say they hold. Raises EngineError when they differ or overlap."""
        if sorted(held) != self._runs:
            raise EngineError(f"runs {self._runs} are handed out and {sorted(held)} are held")
        bounds = [(0, 0), *self._runs, (self.size, 0)]
        if any(begin + length > following for (begin, length), (following, _) in pairwise(bounds)):
            raise EngineError(f"runs {self._runs} overlap or leave the pool of {self.size}")
