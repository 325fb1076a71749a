"""The one way in which Atlas chooses: ask every candidate, keep every answer."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from msgspec import Struct

from atlas_core.vocab.errors import ResolveError
from atlas_core.vocab.verdict import Verdict

T = TypeVar("T")
EQUAL = "equal ranks would leave the choice to chance"


class Candidate(Struct, frozen=True):
    """Someone who was asked, and the answer."""

    name: str
    verdict: Verdict


class Resolution(Struct, Generic[T], frozen=True):
    """The accepted candidate of the highest rank, if any, and everybody who was asked."""

    winner: T | None
    name: str
    candidates: tuple[Candidate, ...]

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """Everybody but the winner."""
        return tuple(c for c in self.candidates if c.name != self.name)

    @property
    def rank(self) -> int:
        """The winner's rank. Raises StopIteration when nobody won."""
        return next(c.verdict.rank for c in self.candidates if c.name == self.name)

    def require(self, what: str, cure: str) -> T:
        """The winner. Raises ResolveError with every candidate's reasons when there is none."""
        if self.winner is None:
            raise ResolveError(what, explain(self.candidates) or "there is no candidate at all", cure)
        return self.winner


def explain(candidates: Iterable[Candidate]) -> str:
    """One clause for each candidate."""
    return "; ".join(f"{c.name}: {', '.join(c.verdict.reasons) or 'accepted'}" for c in candidates)


def resolve(
    candidates: Iterable[tuple[str, T]], ask: Callable[[T], Verdict], *, tie: str = "pin one of them, or give one a higher rank"
) -> Resolution[T]:  # fmt: skip
    """Ask every candidate; the highest rank among those that accept wins. ``tie`` is the cure where two share it.

    Raises ResolveError naming both when two share the highest rank: a choice by accident is no choice.
    """
    asked = [(name, candidate, ask(candidate)) for name, candidate in candidates]
    accepted = sorted((entry for entry in asked if entry[2].ok), key=lambda entry: -entry[2].rank)
    table = tuple(Candidate(name, verdict) for name, _, verdict in asked)
    if not accepted:
        return Resolution(None, "", table)
    if len(accepted) > 1 and accepted[0][2].rank == accepted[1][2].rank:
        raise ResolveError(
            f"{accepted[0][0]} and {accepted[1][0]} both answer with rank {accepted[0][2].rank}",
            EQUAL,
            tie,
        )
    return Resolution(accepted[0][1], accepted[0][0], table)
