"""Teacher forcing: the logits of every position of given token sequences, through the very graphs that serve.

For checks against references: it goes round the scheduler, and must not be used on a runner that is serving.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from atlas_core.engine.runner import Runner
from atlas_core.ops.step import Word
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.plan import StepPlan
from atlas_core.vocab.errors import EngineError


def forced_logits(
    runner: Runner, limits: Limits, sequences: Sequence[Sequence[int]], chunk: int, context: int = 0
) -> list[npt.NDArray[np.float32]]:
    """float32 [len(sequence) - context, vocabulary] for each sequence, computed side by side in pieces of ``chunk`` tokens.

    The first ``context`` tokens of each are read in one step of their own, without logits.
    Raises EngineError when there are more sequences than slots, or when a step would want more logits than its rows.
    """
    slots, pages = limits.layout.slots, limits.pages_for(max(map(len, sequences)))
    if len(sequences) > slots or len(sequences) * chunk > slots:
        raise EngineError(
            f"{len(sequences)} sequences in pieces of {chunk} need {len(sequences) * chunk} rows of logits",
            f"a step has {slots}", "use smaller pieces or a larger --max-batch-size",
        )  # fmt: skip
    if len(sequences) * pages > min(limits.pages):
        raise EngineError(
            f"{len(sequences)} sequences need {len(sequences) * pages} pages", f"there are {limits.pages}"
        )
    pieces: list[list[npt.NDArray[np.float32]]] = [[] for _ in sequences]
    if context:
        updates = [u for index, tokens in enumerate(sequences) for u in _place(limits, index, len(tokens), pages)]
        parts = [list(tokens[:context]) for tokens in sequences]
        runner.collect(runner.launch(_plan(range(len(sequences)), parts, updates, wanted=False)))
    start = context
    while any(start < len(tokens) for tokens in sequences):
        live = [index for index, tokens in enumerate(sequences) if start < len(tokens)]
        parts = [list(sequences[index][start : start + chunk]) for index in live]
        updates = [] if start else [u for index in live for u in _place(limits, index, len(sequences[index]), pages)]
        ticket = runner.launch(_plan(live, parts, updates))
        logits = runner.read_logits(ticket)
        runner.collect(ticket)
        offset = 0
        for index, part in zip(live, parts, strict=True):
            pieces[index].append(logits[offset : offset + len(part)])
            offset += len(part)
        start += chunk
    return [np.concatenate(piece) for piece in pieces]


def _place(limits: Limits, slot: int, length: int, pages: int) -> list[tuple[int, int]]:
    """Updates that give ``slot`` a fresh start with pages of its own, greedy, without extras."""
    layout = limits.layout
    fields = dict.fromkeys(Word, 0) | {
        Word.PROMPT_LENGTH: length, Word.PENALTY_ROW: -1, Word.LOGPROBS: -1, Word.STATE_IN: slot, Word.STATE_OUT: slot,
    }  # fmt: skip
    updates = [(layout.word(slot, field), value) for field, value in fields.items()]
    for group in range(len(layout.table_blocks)):
        updates += [(layout.block(slot, group, i), slot * pages + i) for i in range(pages)]
    return updates


def _plan(
    slots: Sequence[int], parts: Sequence[Sequence[int]], updates: Sequence[tuple[int, int]], *, wanted: bool = True
) -> StepPlan:
    """A step whose logits are ``wanted`` of all tokens, or of none."""
    lengths = [len(part) for part in parts]
    total = sum(lengths) if wanted else 0
    return StepPlan(
        sequences=(),
        row_slot=tuple(slots),
        token_ids=tuple(token for part in parts for token in part),
        cu_q=tuple(int(x) for x in np.concatenate([[0], np.cumsum(lengths)])),
        logits_rows=tuple(range(total)),
        sample_row=(-1,) * total,
        updates=tuple(updates),
        clear_penalty=(),
        logprobs=False,
    )
