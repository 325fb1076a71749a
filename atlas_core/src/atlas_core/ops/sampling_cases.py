"""Conformance trials of the ops between logits and the next token.

Discrete answers are asked only where they are clear: draws are repeated until no rounding of a few units in the last place
could change the choice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from atlas_core.ops.batch import Batch, BatchShape, batch_case, float_bits, make_batch
from atlas_core.ops.references import PROMPT_BIT
from atlas_core.ops.sampling import choose, gumbel
from atlas_core.ops.step import Word
from atlas_core.ops.trials import Array, Generate, Rng, Shape, Trial, normal
from atlas_core.vocab.sampling import MAX_TOP_LOGPROBS, SamplingParams

PARAMS = (
    SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.9), SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=1.1, top_k=40, top_p=0.8, min_p=0.02), SamplingParams(temperature=1.0, top_p=0.0),
    SamplingParams(temperature=1.0, top_p=1e-9), SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=2**31 - 1), SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=1e-7), SamplingParams(temperature=5.0, top_k=3, top_p=0.99),
)  # fmt: skip
QUERIES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1,) * 13, (1, 1)),
    ((1,), (1,) * 5),
    ((3, 1, 0, 7), (9, 1)),
)
SIZES = (97, 1000, 49152)
LARGE_SIZES = (128256,)
_MARGIN = 1e-3


def _rows(batch: Batch, number: int) -> Array:
    """Rows of logits for every sequence with tokens, in reverse, and in the second case one row of no sequence."""
    rows = [row for row, query in enumerate(batch.queries) if query][::-1]
    return np.array([*rows, -1] if number else rows, np.int32)


def _trials(
    rng: Rng, large: bool, bias_pairs: int, fill: Callable[[Batch, Array, int], tuple[dict[str, Array], dict[str, Any]]],
    operands: Callable[[int, int], dict[str, Shape]],
) -> Iterator[Trial]:  # fmt: skip
    """Trials over batches and vocabulary sizes.

    ``fill(batch, sample_row, vocab)`` gives an op's own arrays and attrs, ``operands(vocab, slots)`` the shapes of what it has besides
    slots and rows.
    """
    for vocab in LARGE_SIZES if large else SIZES:
        for queries in (((1,) * 8,) * 2,) if large else QUERIES:
            longest = max(map(max, queries))
            shape = BatchShape.for_room(max(map(len, queries)), 64, 16, bias_pairs)
            shapes: dict[str, Shape] = {
                "sample_row": ("R",), "row_slot": ("S",), "slots": (shape.layout.words,),
                **operands(vocab, shape.layout.slots),
            }  # fmt: skip
            label = f"vocab={vocab} rows={len(queries[0])} longest={longest}"
            cases = []
            for number, part in enumerate(queries):
                batch = make_batch(rng, shape, part, [int(c) for c in rng.integers(0, 40, len(part))])
                sample_row = _rows(batch, number)
                arrays, attrs = fill(batch, sample_row, vocab)
                arrays |= {"sample_row": sample_row, "row_slot": batch.row_slot, "slots": batch.slots}
                if "cu_q" in shapes:
                    arrays["cu_q"] = batch.cu_q
                attrs |= {"slot_stride": shape.layout.stride}
                cases.append(batch_case(batch, label, arrays, attrs, shapes, longest, rows=len(sample_row)))
            yield Trial(cases[0], cases[1])


def process_logits(rng: Rng, large: bool) -> Iterator[Trial]:
    """Every combination of bias, mask and penalties over the rows, with neutral rows between."""

    def fill(batch: Batch, sample_row: Array, vocab: int) -> tuple[dict[str, Array], dict[str, Any]]:
        layout = batch.shape.layout
        mask = rng.integers(0, 2**32, (layout.slots, -(-vocab // 32)), dtype=np.uint32)
        penalty = rng.integers(0, 3, (layout.slots, vocab)).astype(np.int32)
        penalty[rng.random(penalty.shape) < 0.3] |= PROMPT_BIT
        for row in range(len(batch.queries)):
            batch.set_sampling(row, SamplingParams())
            if row & 1:
                values = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=-0.5)
                batch.set_sampling(row, values, penalty_row=int(batch.row_slot[row]))
            batch.slots[batch.word(row, Word.MASK)] = (row >> 1) & 1
            if row & 4 or row == 0:
                _bias(rng, batch, row, vocab)
        logits = normal(rng, len(sample_row), vocab, scale=3.0)
        return {"logits": logits, "mask": mask, "penalty": penalty}, {"bias_start": layout.bias_start}

    def operands(vocab: int, slots: int) -> dict[str, Shape]:
        words = -(-vocab // 32)
        return {"logits": ("R", vocab), "penalty": (slots, vocab), "mask": (slots, words), "y": ("R", vocab)}

    return _trials(rng, large, 3 * 16, fill, operands)


def _bias(rng: Rng, batch: Batch, row: int, vocab: int) -> None:
    """Three pairs of distinct tokens in the row's own part of the bias region, one of them −∞."""
    batch.slots[batch.word(row, Word.BIAS_START)] = 3 * row
    batch.slots[batch.word(row, Word.BIAS_COUNT)] = 3
    start = batch.shape.layout.bias_start + 6 * row
    for pair, token in enumerate(rng.permutation(vocab)[:3]):
        value = (-np.inf, 4.5, -2.25)[pair]
        batch.slots[start + 2 * pair : start + 2 * pair + 2] = int(token), float_bits(value)


def sample(rng: Rng, large: bool) -> Iterator[Trial]:
    """Parameters over the rows; ties at temperature 0; masked tokens."""

    def fill(batch: Batch, sample_row: Array, vocab: int) -> tuple[dict[str, Array], dict[str, Any]]:
        logits = normal(rng, len(sample_row), vocab, scale=2.0)
        for index, row in enumerate(sample_row):
            if row < 0:
                continue
            params = PARAMS[(int(row) + len(batch.queries)) % len(PARAMS)]
            logits[index], seed = clear_draw(rng, params, vocab, batch.contexts[row] + batch.queries[row])
            batch.set_sampling(int(row), SamplingParams(**{**_asdict(params), "seed": seed}))
        return {"logits": logits}, {}

    def operands(vocab: int, slots: int) -> dict[str, Shape]:
        return {"cu_q": ("S+1",), "logits": ("R", vocab), "sampled": ("R",)}

    return _trials(rng, large, 0, fill, operands)


def _asdict(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def clear_draw(rng: Rng, params: SamplingParams, vocab: int, position: int) -> tuple[Array, int]:
    """(logits, seed) whose sampled token no rounding can change. Greedy rows carry exact ties, which the lower id wins."""
    while True:
        logits = normal(rng, vocab, scale=2.0)
        logits[rng.random(vocab) < 0.1] = -np.inf
        seed = int(rng.integers(0, 2**63))
        if params.greedy:
            logits[rng.permutation(vocab)[:2]] = np.float32(12.0)
            return logits, seed
        if clear(logits, params, gumbel(seed, position, vocab)):
            return logits, seed


def clear(logits: Array, params: SamplingParams, noise: Array) -> bool:
    """Whether thresholds moved by a thousandth, and keys by as much, leave the choice of a sampled token as it is."""

    def chosen(top_p: float, min_p: float) -> int:
        return choose(logits, params.temperature, params.top_k, top_p, min_p, noise)

    scaled = (logits - logits.max()) / np.float32(params.temperature)
    ranked = np.sort(scaled)[::-1]
    if 0 < params.top_k < len(ranked) and ranked[params.top_k - 1] - ranked[params.top_k] < _MARGIN:
        return False
    if ranked[0] - ranked[1] < _MARGIN:
        return False
    narrow, wide = 1 - _MARGIN, 1 + _MARGIN
    token = chosen(params.top_p, params.min_p)
    if params.top_p < 1 and {
        chosen(params.top_p * narrow, params.min_p),
        chosen(min(1, params.top_p * wide), params.min_p),
    } != {token}:
        return False
    if params.min_p > 0 and {
        chosen(params.top_p, params.min_p * narrow),
        chosen(params.top_p, min(1, params.min_p * wide)),
    } != {token}:
        return False
    # Without the chosen token the runner-up among the survivors must be clearly behind.
    blocked = noise.copy()
    blocked[token] = -np.inf
    second = choose(logits, params.temperature, params.top_k, params.top_p, params.min_p, blocked)
    return second == token or bool(scaled[token] + noise[token] - scaled[second] - noise[second] > _MARGIN)


def logprobs(rng: Rng, large: bool) -> Iterator[Trial]:
    """None, zero, some and all alternatives, of sampled and of given tokens; exact ties, which go by id."""
    wanted: Sequence[int | None] = (5, None, 0, MAX_TOP_LOGPROBS, 1)

    def fill(batch: Batch, sample_row: Array, vocab: int) -> tuple[dict[str, Array], dict[str, Any]]:
        for row in range(len(batch.queries)):
            batch.set_sampling(row, SamplingParams(logprobs=wanted[row % len(wanted)]))
        # Multiples of 2^-6 below 2^4 are exact in every activation type's float32: order and ties are beyond doubt.
        logits = np.round(normal(rng, len(sample_row), vocab, scale=3.0) * 64).astype(np.float32) / np.float32(64)
        sampled = rng.integers(0, vocab, len(sample_row)).astype(np.int32)
        sampled[sample_row < 0] = -1
        scored = np.full((len(sample_row), 2), (-1, 0), np.int32)
        for index in np.flatnonzero((sample_row < 0) | (rng.random(len(sample_row)) < 0.2)):
            scored[index] = rng.integers(0, vocab), (0, 3, MAX_TOP_LOGPROBS)[index % 3]
        return {"logits": logits, "sampled": sampled, "scored": scored}, {}

    def operands(vocab: int, slots: int) -> dict[str, Shape]:
        wide = 1 + MAX_TOP_LOGPROBS
        return {
            "logits": ("R", vocab),
            "sampled": ("R",),
            "scored": ("R", 2),
            "values": ("R", wide),
            "ids": ("R", wide),
        }

    return _trials(rng, large, 0, fill, operands)


def advance(rng: Rng, large: bool) -> Iterator[Trial]:
    """Rows that sampled, rows that only consumed, rows that did neither."""

    def fill(batch: Batch, sample_row: Array, vocab: int) -> tuple[dict[str, Array], dict[str, Any]]:
        return {"sampled": rng.integers(0, vocab, len(sample_row)).astype(np.int32)}, {}

    def operands(vocab: int, slots: int) -> dict[str, Shape]:
        return {"cu_q": ("S+1",), "sampled": ("R",)}

    return _trials(rng, large, 0, fill, operands)


GENERATORS: Mapping[str, Generate] = {
    "process_logits": process_logits, "sample": sample, "logprobs": logprobs, "advance": advance,
}  # fmt: skip
