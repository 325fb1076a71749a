"""The state of one request while the engine has it."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Protocol

from msgspec import Struct, field

from atlas_core.ops.step import Word
from atlas_core.scheduler.prefix import Chain
from atlas_core.scheduler.snapshots import Seat


class State(Enum):
    """Where a sequence stands.

    ``LEAVING`` gives its slot and pages back as soon as no step in flight uses them, and then waits again (preempted)
    or is ``ENDED``; ``finished`` tells which.
    """

    WAITING = auto()
    RUNNING = auto()
    LEAVING = auto()
    ENDED = auto()


class Restriction(Protocol):
    """Decides which tokens may come next in one sequence."""

    def wanted(self, index: int) -> bool:
        """Whether generated token ``index`` (from 0) may have to be chosen from fewer tokens than all.

        Asked when not all tokens before it are known, perhaps; where they could make a difference, the answer is yes.
        """
        ...

    def fill(self, row: Any) -> None:
        """Write the mask of the next token, an array uint32 [ceil(vocabulary / 32)], for the tokens accepted so far."""
        ...

    def accept(self, token: int) -> None:
        """A token was generated."""
        ...


class Holding(Struct):
    """What a running sequence holds.

    ``tabled`` is the number of block table entries that the device knows, per group. ``chain`` is what of ``pages`` others may use.
    ``seat`` are the places of its recurrent states, where these are kept; a snapshot is taken at each of ``stops``, the next one last.
    """

    slot: int
    pages: list[list[int]]
    tabled: list[int]
    penalty_row: int | None
    bias: tuple[int, int] | None
    chain: Chain
    seat: Seat | None = None
    stops: list[int] = field(default_factory=list)


class Sequence(Struct, eq=False):
    """One request.

    ``tokens`` are prompt and generated tokens as far as they are known; ``pending`` more have been asked of the device.
    ``computed`` tokens have been given to the device since admission; the first ``prefill_end`` of them by value, later
    ones by the marker of the slot's last token. ``in_flight`` launched steps have not been collected yet. ``max_new``
    tokens are generated at most. ``pairs`` are bias pairs (token, value bits), the last ``banned`` of which forbid stop
    tokens until ``min_new`` are generated. ``order`` is the place in the line, kept through preemption. ``fields`` are
    the slot words that do not depend on the slot. ``masked`` is whether the device applies the slot's mask. ``scoring`` is the number
    of alternatives wanted for each prompt token, None for none; the first ``scored`` tokens have been asked about their successors.
    Pages are shared within one name ``space`` only. ``found`` tokens had been computed before the sequence ran for the first time, None
    before it does.
    """

    id: str
    order: int
    prompt_length: int
    tokens: list[int]
    max_new: int
    min_new: int
    fields: Mapping[Word, int]
    pairs: tuple[tuple[int, int], ...]
    banned: int
    penalised: bool
    state: State = State.WAITING
    finished: bool = False
    holding: Holding | None = None
    prefill_end: int = 0
    computed: int = 0
    pending: int = 0
    in_flight: int = 0
    bans: bool = field(default=False)
    restriction: Restriction | None = None
    masked: bool = False
    scoring: int | None = None
    scored: int = 0
    space: str = ""
    found: int | None = None

    @property
    def generated(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - self.prompt_length

    @property
    def prefilling(self) -> bool:
        """Whether known tokens still have to be given to the device by value."""
        return self.computed < self.prefill_end

    @property
    def unscored(self) -> bool:
        """Whether prompt tokens are left whose log-probabilities have to be asked for."""
        return self.scoring is not None and self.scored < self.prompt_length - 1

    @property
    def reusable(self) -> int:
        """Tokens at the beginning that need not be computed if their pages are there: the last one is sampled from."""
        most = len(self.tokens) - 1
        return min(most, self.scored) if self.unscored else most

    @property
    def complete(self) -> bool:
        """Whether every token that may be generated is known or asked for."""
        return self.generated + self.pending >= self.max_new
