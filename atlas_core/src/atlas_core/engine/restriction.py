"""Which tokens may come next: those of the grammar, or the end of a thought that has gone on for too long."""

from typing import Protocol

from atlas_core.engine.grammar import Matcher, Row
from atlas_core.vocab.messages import Thinking


class Thinker(Protocol):
    """Who knows whether the output is inside a thought."""

    @property
    def thinking(self) -> bool:
        """Whether it is, after the tokens so far."""
        ...

    @property
    def thought_over(self) -> bool:
        """Whether there is no thought, or none any more, whatever comes."""
        ...


class Answer:
    """A scheduler.sequence.Restriction of one output."""

    def __init__(self, matcher: Matcher | None, thinking: Thinking | None, thinker: Thinker) -> None:
        self._matcher = matcher
        self._budget = None if thinking is None else thinking.budget
        self._end = () if thinking is None else thinking.end_ids
        self._thinker = thinker
        self._known = 0
        self._forced = 0
        self._forcing = False

    @property
    def done(self) -> bool:
        """Whether the grammar is satisfied and nothing more may come."""
        return self._matcher is not None and self._matcher.done

    @property
    def failure(self) -> str:
        """Why the grammar cannot go on; empty when it can."""
        return "" if self._matcher is None else self._matcher.failure

    def wanted(self, index: int) -> bool:
        """Whether generated token ``index`` (from 0) may have to be chosen from fewer tokens than all."""
        return self._matcher is not None or (
            self._budget is not None and index >= self._budget and not self._thinker.thought_over
        )

    def fill(self, row: Row) -> None:
        """Write the mask of the next token, uint32 [ceil(vocabulary / 32)]."""
        self._forcing = self._forces()
        if self._forcing:
            token = self._end[self._forced]
            row.fill(0)
            row[token // 32] = 1 << (token % 32)
        elif self._matcher is not None:
            self._matcher.fill(row)
        else:
            row.fill(0xFFFFFFFF)

    def accept(self, token: int) -> None:
        """A token was generated."""
        self._forced += self._forcing
        self._forcing = False
        self._known += 1
        if self._matcher is not None:
            self._matcher.accept(token)

    def _forces(self) -> bool:
        """Whether the next token is one of the thought's end."""
        over = self._budget is not None and self._known >= self._budget and self._thinker.thinking
        if not over or self._forced == len(self._end):
            return False
        # Not in the middle of a character, where no grammar can go on with a tag.
        return self._forced > 0 or self._matcher is None or self._matcher.allows(self._end[0])
