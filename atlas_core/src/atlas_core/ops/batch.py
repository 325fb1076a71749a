"""Made-up batches: slots, block tables and offsets as an engine would leave them, for cases and golden runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from atlas_core.ops.contract import Case
from atlas_core.ops.step import SlotLayout, Word
from atlas_core.ops.trials import Array, Shapes
from atlas_core.vocab.sampling import SamplingParams

FLOAT_WORDS = {
    Word.TEMPERATURE: "temperature", Word.TOP_P: "top_p", Word.MIN_P: "min_p", Word.PRESENCE: "presence_penalty",
    Word.FREQUENCY: "frequency_penalty", Word.REPETITION: "repetition_penalty",
}  # fmt: skip


def float_bits(value: float) -> int:
    """The bits of a float32 as the int32 that a slot word holds."""
    return int(np.array([value], np.float32).view(np.int32)[0])


class BatchShape(Struct, frozen=True):
    """What two batches of one trial share: ``pages`` of ``page_tokens``, one of which belongs to nobody."""

    layout: SlotLayout
    page_tokens: int
    pages: int

    @classmethod
    def for_room(cls, sequences: int, room: int, page_tokens: int, bias_pairs: int = 0) -> "BatchShape":
        """Slots for ``sequences`` and two idle ones, pages for ``sequences`` of ``room`` positions each."""
        blocks = max(1, -(-room // page_tokens))
        return cls(SlotLayout(sequences + 2, (blocks,), bias_pairs), page_tokens, sequences * blocks + 1)


class Batch(Struct, frozen=True):
    """Rows in random slots with random pages.

    Row r brings ``queries[r]`` tokens after ``contexts[r]`` in the cache. ``spare_page`` is where unused entries of the block tables
    and idle slots point. Arrays as the ops take them: ``cu_q`` [S+1], ``row_slot`` [S], ``slots`` [words].
    """

    shape: BatchShape
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    cu_q: Array
    row_slot: Array
    slots: Array
    spare_page: int

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(self.queries)

    @property
    def positions(self) -> Array:
        """int32 [T]: the position of each token."""
        parts = [np.arange(c, c + q) for c, q in zip(self.contexts, self.queries, strict=True)]
        return np.concatenate([*parts, np.zeros(0)]).astype(np.int32)

    @property
    def token_row(self) -> Array:
        """int32 [T]: the row of each token."""
        return np.repeat(np.arange(len(self.queries), dtype=np.int32), self.queries)

    def word(self, row: int, field: Word) -> int:
        """Index of a field of the slot of ``row``."""
        return self.shape.layout.word(int(self.row_slot[row]), field)

    def page(self, row: int, block: int) -> int:
        """The page of one block of the sequence in ``row``."""
        return int(self.slots[self.shape.layout.block(int(self.row_slot[row]), 0, block)])

    def set_sampling(self, row: int, params: SamplingParams, penalty_row: int = -1) -> None:
        """Write sampling parameters into the slot of ``row``; bias pairs and mask are not part of this."""
        for field, name in FLOAT_WORDS.items():
            self.slots[self.word(row, field)] = float_bits(getattr(params, name))
        seed = (params.seed or 0) & (2**64 - 1)
        low, high = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
        self.slots[self.word(row, Word.SEED_LOW)], self.slots[self.word(row, Word.SEED_HIGH)] = low, high
        self.slots[self.word(row, Word.TOP_K)] = params.top_k
        self.slots[self.word(row, Word.LOGPROBS)] = -1 if params.logprobs is None else params.logprobs
        self.slots[self.word(row, Word.PENALTY_ROW)] = penalty_row


def make_batch(rng: np.random.Generator, shape: BatchShape, queries: Sequence[int], contexts: Sequence[int]) -> Batch:
    """A batch of the shape. Raises ValueError when it has too few slots or pages."""
    layout, size = shape.layout, shape.page_tokens
    slots = np.zeros(layout.words, np.int32)
    pages = [int(page) for page in rng.permutation(shape.pages)]
    spare = pages.pop()
    row_slot = rng.permutation(layout.slots)[: len(queries)].astype(np.int32)
    if len(row_slot) < len(queries):
        raise ValueError(f"{len(queries)} rows do not fit into {layout.slots} slots")
    for slot in range(layout.slots):
        slots[layout.word(slot, Word.LAST_TOKEN)] = slot + 1
        slots[layout.word(slot, Word.POSITION)] = slot + 2
        slots[layout.word(slot, Word.PENALTY_ROW)] = -1
        slots[layout.word(slot, Word.STATE_IN)] = slots[layout.word(slot, Word.STATE_OUT)] = slot
        slots[layout.word(slot, Word.LOGPROBS)] = -1
        slots[layout.word(slot, Word.REPETITION)] = slots[layout.word(slot, Word.TOP_P)] = float_bits(1.0)
        start = layout.block(slot, 0, 0)
        slots[start : start + layout.table_blocks[0]] = spare
    for slot, query, context in zip(row_slot, queries, contexts, strict=True):
        slots[layout.word(int(slot), Word.POSITION)] = context
        slots[layout.word(int(slot), Word.PROMPT_LENGTH)] = context
        blocks = -(-(context + query) // size)
        if blocks > layout.table_blocks[0] or blocks > len(pages):
            raise ValueError(f"{context + query} positions do not fit into the block table or the pages")
        for block in range(blocks):
            slots[layout.block(int(slot), 0, block)] = pages.pop()
    cu_q = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return Batch(shape, tuple(queries), tuple(contexts), cu_q, row_slot, slots, spare)


def batch_case(
    batch: Batch, label: str, arrays: Mapping[str, Array], attrs: Mapping[str, Any], shapes: Shapes,
    max_query: int, **case: Any,
) -> Case:  # fmt: skip
    """A case with the live counts of a batch; rows of logits are the sequences that bring tokens unless told otherwise."""
    rows = case.pop("rows", sum(1 for query in batch.queries if query))
    return Case(
        label, arrays, attrs, batch.tokens, len(batch.queries), rows, max_query=max_query, shapes=shapes, **case
    )
