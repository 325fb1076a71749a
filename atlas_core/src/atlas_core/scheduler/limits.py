"""The sizes within which the scheduler plans."""

from itertools import pairwise
from math import lcm

from msgspec import Struct

from atlas_core.ops.step import SlotLayout, Word
from atlas_core.vocab.errors import BudgetError

PROMPT_SHARE = 4
"""One part in so many of a mixed step is for prompts at least."""
FIELDS = len(Word)
"""Slot words that an admission writes: all of them, so that nothing of the slot's last sequence stays."""


class Limits(Struct, frozen=True):
    """What the device was built for, and how much may wait.

    ``pages`` is the number of pages of each cache group, ``page_tokens`` the positions of one page. ``max_seq_len``
    counts prompt and generated tokens. ``max_prefill_tokens`` bounds the tokens of one step that are not a running
    sequence's next one, and ``max_mixed_tokens`` all tokens of a step in which running sequences get theirs, see
    ``prompt_tokens``. Of these, those of prompts count for more behind a context, twice behind ``even_context`` positions
    (None: all alike), and all together for as much as ``mixed_steps`` say, (tokens, cost in tokens): products of so many tokens, or of
    any number between the size before and this one, take as long as ``cost`` tokens do where they fill the machine best. See
    scheduler.allowance.
    ``max_waiting`` requests may wait beyond those that find a free slot; ``retry_after`` seconds are told to
    the refused. ``prefix_cache``: full pages are kept for prompts that begin alike.

    Where layers have recurrent states, these have one place a slot and ``snapshots`` more. Snapshots are taken at multiples of
    ``chunk``, in which kernels read prompts, and of a prompt where ``least`` tokens need not be computed thanks to them.

    Raises BudgetError when one sequence of ``max_seq_len`` could not run even alone, since then no preemption would
    help it.
    """

    layout: SlotLayout
    page_tokens: int
    pages: tuple[int, ...]
    vocab_size: int
    max_seq_len: int
    max_prefill_tokens: int
    penalty_rows: int
    max_waiting: int
    retry_after: float = 1.0
    max_mixed_tokens: int | None = None
    mixed_steps: tuple[tuple[int, int], ...] = ()
    even_context: int | None = None
    prefix_cache: bool = False
    snapshots: int = 0
    chunk: int = 64
    least: int = 512

    def __post_init__(self) -> None:
        if not self.pages or len(self.pages) != len(self.layout.table_blocks):
            raise ValueError(
                f"{len(self.pages)} page pools for {len(self.layout.table_blocks)} block tables, at least one"
            )
        mixed = self.max_prefill_tokens if self.max_mixed_tokens is None else self.max_mixed_tokens
        even = 1 if self.even_context is None else self.even_context
        if min(self.max_prefill_tokens, mixed, self.layout.slots, even) < 1:
            raise ValueError("max_prefill_tokens, max_mixed_tokens, even_context and slots are at least 1")
        for (size, cost), (larger, dearer) in pairwise(((0, 0), *self.mixed_steps)):
            if larger <= size or dearer <= cost:
                raise ValueError("each of mixed_steps has more tokens and costs more than the one before")
        if self.max_waiting < 0:
            raise ValueError("max_waiting is at least 0")
        need = self.pages_for(self.max_seq_len)
        for group, (have, blocks) in enumerate(zip(self.pages, self.layout.table_blocks, strict=True)):
            if min(have, blocks) < need:
                raise BudgetError(
                    f"one sequence of {self.max_seq_len} tokens does not fit into the cache",
                    f"it needs {need} pages of {self.page_tokens} tokens in cache group {group}, which has {have} "
                    f"and block tables of {blocks}",
                    "lower --max-seq-len or give the cache more memory",
                )

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` positions."""
        return -(-tokens // self.page_tokens)

    def prompt_tokens(self, decodes: int) -> int:
        """Prompt tokens without a context that a step may have beside ``decodes`` tokens of running sequences.

        ``max_mixed_tokens`` counts these too, since kernels work in tiles of a step's tokens, whoever they belong to. However many
        they are, a share of it is left for prompts, which would otherwise never end.
        """
        if not decodes or self.max_mixed_tokens is None:
            return self.max_prefill_tokens
        share = max(1, self.max_mixed_tokens // PROMPT_SHARE)
        return min(self.max_prefill_tokens, max(share, self.max_mixed_tokens - decodes))

    @property
    def max_step_tokens(self) -> int:
        """No step has more tokens: one for every slot, and the prefill budget."""
        return self.layout.slots + self.max_prefill_tokens

    @property
    def max_updates(self) -> int:
        """No step has more slot updates.

        Every slot may be filled anew, lower its bias count, switch its mask, change its places of states, and begin a page in each group beside those that prefill
        fills and those that are found.
        """
        slots, groups = self.layout.slots, len(self.pages)
        pages = groups * (2 * slots + self.max_prefill_tokens // self.page_tokens)
        return slots * (FIELDS + 4) + 2 * self.layout.bias_pairs + pages + self.max_found

    @property
    def places(self) -> int:
        """Places of recurrent states."""
        return self.layout.slots + self.snapshots

    @property
    def grain(self) -> int:
        """Positions between two at which a snapshot may be taken: pages end there, and chunks of kernels."""
        return lcm(self.page_tokens, self.chunk)

    def stops(self, start: int, alike: int, end: int) -> list[int]:
        """Where to take snapshots of a prompt of ``end`` tokens that goes on from ``start``, the last one first.

        Its last tokens may differ in the next turn, so one is taken just before its end; one where it parts from an earlier prompt
        with which ``alike`` tokens are common, since others may do so too; and a few on the way, the fewer the less room there is.
        """
        if not self.snapshots:
            return []
        wanted = [position // self.grain * self.grain for position in (end - 1, min(alike, end - 1))]
        share = -(-self.max_seq_len * 2 // self.snapshots)
        interval = -(-max(2 * self.least, share) // self.grain) * self.grain
        wanted += range(start // interval * interval + interval, end, interval)
        found: list[int] = []
        for position in wanted:
            if all(abs(position - other) >= self.least for other in (start, *found)) and position > start:
                found.append(position)
        return sorted(found, reverse=True)

    @property
    def max_found(self) -> int:
        """No step has more block table entries of pages that were found in the prefix cache: one sequence may find all of its own."""
        return sum(self.layout.table_blocks) if self.prefix_cache else 0
