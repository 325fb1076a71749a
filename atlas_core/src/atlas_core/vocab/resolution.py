"""One way to choose: every candidate answers with a Verdict, the best rank wins, and every answer is kept for explain."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from atlas_core.vocab.errors import ResolveError
from atlas_core.vocab.verdict import Verdict

T = TypeVar("T")
N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """Something that may be chosen: ``name`` is what a person would ask for, ``dist`` who offers it."""

    name: str
    value: T
    dist: str = "atlas-core"

    def __str__(self) -> str:
        return f"{self.name} ({self.dist})"


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """One candidate with its verdict."""

    candidate: Candidate[T]
    verdict: Verdict

    def __str__(self) -> str:
        reasons = "; ".join(self.verdict.reasons) or "no reason given"
        if not self.verdict.ok:
            return f"{self.candidate}: no: {reasons}"
        return f"{self.candidate}: yes, rank {self.verdict.rank}" + (f": {reasons}" if self.verdict.reasons else "")


@dataclass(frozen=True, slots=True)
class Resolution(Generic[T]):
    """The winner and every answer, best first: accepted by falling rank, then refused; otherwise in the order asked."""

    winner: Candidate[T]
    answers: tuple[Answer[T], ...]


def resolve(candidates: Iterable[Candidate[T]], need: N, ask: Callable[[T, N], Verdict], *, what: str) -> Resolution[T]:
    """Ask every candidate about ``need`` and take the one of highest rank.

    ``what`` names the kind of thing in messages (hardware, container, implementation of linear); ``str(need)`` names the need.
    All candidates are asked, also after one accepted, so that explain can show every reason. Raises ResolveError when
    nobody accepts, with each refusal, and when two share the best rank, naming both.
    """
    asked = [Answer(candidate, ask(candidate.value, need)) for candidate in candidates]
    answers = sorted(asked, key=lambda answer: (not answer.verdict.ok, -answer.verdict.rank if answer.verdict.ok else 0))
    accepted = [answer for answer in answers if answer.verdict.ok]
    if not accepted:
        raise ResolveError(
            f"no {what} for {need}",
            "\n        ".join(map(str, answers)) or f"no {what} is installed",
            f"change what the reasons name, or install a plugin that offers {what} for it",
        )
    best = accepted[0]
    tied = [answer for answer in accepted if answer.verdict.rank == best.verdict.rank]
    if len(tied) > 1:
        raise ResolveError(
            f"{len(tied)} candidates of {what} are equally good for {need}",
            "\n        ".join(map(str, tied)),
            "ask for one of them by name, or uninstall the others",
        )
    return Resolution(best.candidate, tuple(answers))
