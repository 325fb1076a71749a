"""One step, as values: what the input arrays of its graphs shall hold (see ops.step and ops.references.step_begin)."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct, field

from atlas_core.scheduler.sequence import Restriction, Sequence

LAST_TOKEN_MARKER = -1
"""Stands for the slot's last sampled token, which the host may not know yet."""


class Scored(NamedTuple):
    """A prompt token that is asked for its log-probability: by entry ``place`` of ``logits_rows``, which belongs to ``row``."""

    place: int
    row: int
    token: int
    alternatives: int


class Counted(NamedTuple):
    """What ``row`` of the penalty pool shall hold before the step: tokens that a sequence need not compute, those of its prompt apart."""

    row: int
    prompt: tuple[int, ...]
    generated: tuple[int, ...]


class StepPlan(Struct, frozen=True):
    """Rows of a step.

    Row i belongs to ``sequences[i]`` in ``row_slot[i]`` and brings tokens ``cu_q[i]`` to ``cu_q[i + 1] - 1``.

    ``logits_rows`` are the tokens whose logits are wanted and ``sample_row`` the rows that they belong to, or -1 for those that are not
    sampled from: ``scored`` tells what else they are for. ``updates``
    are (word, value) pairs for the slots array, int32. ``clear_penalty`` are rows of the penalty pool to be zeroed
    before the step, and ``counted`` those that shall hold something. ``logprobs`` says whether any sampled row wants them. ``masks`` are slots whose token mask is to be
    written before the step samples, with who writes it; ``late`` when one of them depends on a token of the step before. ``attended``
    counts, for each token, the positions up to the last one of its row.
    """

    sequences: tuple[Sequence, ...]
    row_slot: tuple[int, ...]
    token_ids: tuple[int, ...]
    cu_q: tuple[int, ...]
    logits_rows: tuple[int, ...]
    sample_row: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    clear_penalty: tuple[int, ...]
    logprobs: bool
    masks: tuple[tuple[int, Restriction], ...] = ()
    scored: tuple[Scored, ...] = ()
    late: bool = False
    counted: tuple[Counted, ...] = ()
    attended: int = 0

    @property
    def max_query(self) -> int:
        """The most tokens of one row."""
        return max(end - start for start, end in pairwise(self.cu_q))


class PlanBuilder(Struct):
    """Collects rows and updates of one step."""

    _sequences: list[Sequence] = field(default_factory=list)
    _row_slot: list[int] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _cu_q: list[int] = field(default_factory=lambda: [0])
    _logits_rows: list[int] = field(default_factory=list)
    _sample_row: list[int] = field(default_factory=list)
    _updates: list[tuple[int, int]] = field(default_factory=list)
    _clear_penalty: list[int] = field(default_factory=list)
    _logprobs: bool = False
    _masks: list[tuple[int, Restriction]] = field(default_factory=list)
    _scored: list[Scored] = field(default_factory=list)
    _late: bool = False
    _counted: list[Counted] = field(default_factory=list)
    _attended: int = 0

    @property
    def logits(self) -> int:
        """Tokens whose logits are wanted so far."""
        return len(self._logits_rows)

    @property
    def rows(self) -> int:
        """Rows so far."""
        return len(self._sequences)

    def update(self, word: int, value: int) -> None:
        """Write ``value`` (signed or unsigned 32 bits) to a word of the slots array."""
        self._updates.append((word, signed(value)))

    def clear_penalty(self, row: int) -> None:
        """Zero a row of the penalty pool."""
        self._clear_penalty.append(row)

    def count(self, row: int, prompt: Iterable[int], generated: Iterable[int]) -> None:
        """Have a row of the penalty pool hold these tokens."""
        self._counted.append(Counted(row, tuple(prompt), tuple(generated)))

    def mask(self, slot: int, restriction: Restriction, *, late: bool) -> None:
        """Let ``restriction`` write the slot's mask; ``late``: it waits for a token that has been asked of the device."""
        self._masks.append((slot, restriction))
        self._late = self._late or late

    def score(self, offset: int, token: int, alternatives: int) -> None:
        """Ask the next row's token ``offset`` for the log-probability of ``token`` behind it."""
        self._scored.append(Scored(len(self._logits_rows), len(self._sequences), token, alternatives))
        self._logits_rows.append(len(self._token_ids) + offset)
        self._sample_row.append(-1)
        self._logprobs = True

    def row(
        self, sequence: Sequence, slot: int, tokens: Iterable[int], *, end: int, sampled: bool, logprobs: bool
    ) -> None:
        """A sequence's tokens up to position ``end``; its last one is sampled from when ``sampled``."""
        self._token_ids.extend(tokens)
        if sampled:
            self._logits_rows.append(len(self._token_ids) - 1)
            self._sample_row.append(len(self._sequences))
            self._logprobs = self._logprobs or logprobs
        self._sequences.append(sequence)
        self._row_slot.append(slot)
        self._cu_q.append(len(self._token_ids))
        self._attended += (self._cu_q[-1] - self._cu_q[-2]) * end

    def build(self) -> StepPlan | None:
        """The plan, or None when there is nothing to run."""
        if not self._sequences:
            return None
        return StepPlan(
            tuple(self._sequences), tuple(self._row_slot), tuple(self._token_ids), tuple(self._cu_q),
            tuple(self._logits_rows), tuple(self._sample_row), tuple(self._updates), tuple(self._clear_penalty),
            self._logprobs, tuple(self._masks), tuple(self._scored), self._late, tuple(self._counted), self._attended,
        )  # fmt: skip


def signed(value: int) -> int:
    """The int32 with the same 32 bits."""
    return value - (1 << 32) if value >= 1 << 31 else value
