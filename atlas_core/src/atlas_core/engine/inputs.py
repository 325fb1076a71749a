"""The inputs of a step as one block of int32, so that one copy brings them all to the device."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from atlas_core.contracts.ops import Buffer
from atlas_core.model.planner import Bucket
from atlas_core.ops.step import COUNT_WORDS, Count
from atlas_core.scheduler.plan import StepPlan

COUNTS = "counts"
_ALIGNMENT = 64
_WORD = 4


class InputLayout(Struct, frozen=True):
    """Where each input lies in the block of one bucket.

    Updates, which are mostly few, come last: only what is live is copied.

    Buckets share one block of device memory (they never run at once), each with offsets of its own.
    """

    bucket: Bucket

    @property
    def words(self) -> dict[str, int]:
        """int32 words of each input, in order, at their largest."""
        bucket = self.bucket
        return {
            COUNTS: COUNT_WORDS,
            "cu_q": bucket.sequences + 1,
            "row_slot": bucket.sequences,
            "logits_rows": bucket.rows,
            "sample_row": bucket.rows,
            "scored": 2 * bucket.rows,
            "token_ids": bucket.tokens,
            "updates": 2 * bucket.updates,
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each input."""
        offset = 0
        result = {}
        for name, words in self.words.items():
            result[name] = offset
            offset += -(-words * _WORD // _ALIGNMENT) * _ALIGNMENT
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block."""
        return self.offsets["updates"] + self.words["updates"] * _WORD

    def buffers(self, base: int) -> Mapping[str, Buffer]:
        """Device buffers by value name, ``counts`` among them, in a block at ``base``."""
        words = self.words
        return {name: Buffer(base + offset, words[name] * _WORD) for name, offset in self.offsets.items()}


class InputWriter:
    """Writes plans into blocks of one layout."""

    def __init__(self, layout: InputLayout) -> None:
        self.bucket = layout.bucket
        self._starts = {name: offset // _WORD for name, offset in layout.offsets.items()}

    def fits(self, plan: StepPlan) -> bool:
        """Whether the bucket is large enough for the plan."""
        bucket = self.bucket
        return (
            len(plan.token_ids) <= bucket.tokens
            and len(plan.row_slot) <= bucket.sequences
            and len(plan.logits_rows) <= bucket.rows
            and len(plan.updates) <= bucket.updates
            and plan.max_query <= bucket.max_query
        )

    def write(self, plan: StepPlan, block: npt.NDArray[np.int32]) -> int:
        """Fill ``block`` (int32) with a plan that fits; returns how many of its bytes are live."""
        counts = np.zeros(COUNT_WORDS, np.int32)
        counts[Count.TOKENS] = len(plan.token_ids)
        counts[Count.SEQUENCES] = len(plan.row_slot)
        counts[Count.ROWS] = len(plan.logits_rows)
        counts[Count.UPDATES] = len(plan.updates)
        self._put(block, COUNTS, counts)
        self._put(block, "cu_q", plan.cu_q)
        self._put(block, "row_slot", plan.row_slot)
        self._put(block, "logits_rows", plan.logits_rows)
        self._put(block, "sample_row", plan.sample_row)
        scored = np.full((len(plan.logits_rows), 2), (-1, 0), np.int32)
        for place, _, token, alternatives in plan.scored:
            scored[place] = token, alternatives
        self._put(block, "scored", scored.reshape(-1))
        self._put(block, "token_ids", plan.token_ids)
        updates = np.array(plan.updates, np.int32).reshape(-1)
        self._put(block, "updates", updates)
        return (self._starts["updates"] + len(updates)) * _WORD

    def _put(self, block: npt.NDArray[np.int32], name: str, values: tuple[int, ...] | npt.NDArray[np.int32]) -> None:
        start = self._starts[name]
        block[start : start + len(values)] = values
