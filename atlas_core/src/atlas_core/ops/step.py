"""What a step reads from device memory besides activations: live counts and the state of each slot.

Both are int32 arrays. The same word numbers stand in ``kernels/include/atlas_step.h`` for kernels; a test compares the two.
Floats are stored by their bits. A slot holds one running sequence; rows of a step name slots through ``row_slot``.
"""

from enum import IntEnum

from msgspec import Struct


class Count(IntEnum):
    """Words of the ``counts`` array, written by the host before each step."""

    TOKENS = 0
    SEQUENCES = 1
    ROWS = 2
    UPDATES = 3


COUNT_WORDS = 8


class Word(IntEnum):
    """Words of one slot before its block tables.

    ``POSITION`` is the number of tokens already in the cache; ``LAST_TOKEN`` the token sampled last, not yet in the cache.
    ``PROMPT_LENGTH`` divides prompt tokens (below) from generated ones for the penalties. ``PENALTY_ROW`` is the row of the
    pool of token counts, or -1. ``BIAS_START``/``BIAS_COUNT`` name (token, value) pairs in the bias region behind the slots.
    ``LOGPROBS`` is the number of alternatives wanted, or -1. ``MASK`` is 1 when the slot's row of the token mask applies.
    ``STATE_IN`` and ``STATE_OUT`` are the places among recurrent states that a step reads and writes.
    """

    LAST_TOKEN = 0
    POSITION = 1
    PROMPT_LENGTH = 2
    PENALTY_ROW = 3
    TEMPERATURE = 4
    TOP_P = 5
    TOP_K = 6
    MIN_P = 7
    PRESENCE = 8
    FREQUENCY = 9
    REPETITION = 10
    SEED_LOW = 11
    SEED_HIGH = 12
    BIAS_START = 13
    BIAS_COUNT = 14
    LOGPROBS = 15
    MASK = 16
    STATE_IN = 17
    STATE_OUT = 18


TABLE_START = 24
"""First word of the block tables; words between the last field and here are reserved and zero."""


class SlotLayout(Struct, frozen=True):
    """Where everything lies in the ``slots`` array of ``words`` int32.

    ``table_blocks`` is the length of the block table of each cache group; ``bias_pairs`` the capacity of the bias region.
    """

    slots: int
    table_blocks: tuple[int, ...]
    bias_pairs: int

    @property
    def stride(self) -> int:
        """Words from one slot to the next."""
        return -(-(TABLE_START + sum(self.table_blocks)) // 8) * 8

    @property
    def bias_start(self) -> int:
        """First word of the bias region: pairs of token id and value bits."""
        return self.slots * self.stride

    @property
    def words(self) -> int:
        """Length of the array."""
        return self.bias_start + 2 * self.bias_pairs

    def word(self, slot: int, field: Word) -> int:
        """Index of one field of one slot."""
        return slot * self.stride + field

    def table_offset(self, group: int) -> int:
        """Word of the first block of ``group``, relative to the slot."""
        return TABLE_START + sum(self.table_blocks[:group])

    def block(self, slot: int, group: int, index: int) -> int:
        """Index of one entry of one block table."""
        return slot * self.stride + self.table_offset(group) + index
