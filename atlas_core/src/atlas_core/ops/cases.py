"""Conformance trials of the forward ops: odd sizes, ragged and empty rows, long contexts, page borders, windows."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from atlas_core.ops import heads_cases, moe_cases, recurrent_cases, sampling_cases
from atlas_core.ops.batch import Batch, BatchShape, batch_case, make_batch
from atlas_core.ops.step import Word
from atlas_core.ops.trials import Array, Generate, Live, Rng, Shape, Trial, normal, pair
from atlas_core.vocab.dtype import DType

ROWS = (
    (Live.decode(3), Live.decode(1)), (Live.decode(1), Live.decode(8)), (Live.prefill(17), Live.prefill(40)),
    (Live.prefill(130), Live.prefill(1)),
)  # fmt: skip
"""Live counts to try on ops whose rows are independent."""
LARGE_ROWS = (
    (Live.decode(1), Live.decode(1)),
    (Live.decode(8), Live.decode(8)),
    (Live.prefill(512), Live.prefill(512)),
)
SEVERAL = ((Live.prefill(650), Live.prefill(390)),)
"""Prompts of several tiles of tokens, the last one not full."""
MIXED = ((Live.mixed(5), Live.mixed(0)), (Live.mixed(2), Live.mixed(6)))


def trials(op: str, seed: int, *, large: bool = False) -> Iterator[Trial]:
    """The trials of one primitive, the same for the same seed. Raises KeyError for an op that has none."""
    for index, trial in enumerate(GENERATORS[op](np.random.default_rng([seed, *op.encode()]), large)):
        yield replace(trial, spare=(2, 0, 5)[index % 3])


def _count(live: Live) -> str:
    if live.max_query == 1:
        return f"decode={live.tokens}"
    return f"tokens={live.tokens}" if live.sequences == 1 else f"rows={live.rows}"


def embed(rng: Rng, large: bool) -> Iterator[Trial]:
    """Embedding rows; first and last of the vocabulary among them."""
    for vocab, hidden in ((128256, 4096),) if large else ((50, 64), (97, 33), (301, 576)):
        weight = normal(rng, vocab, hidden)
        for lives in LARGE_ROWS if large else ROWS:

            def make(live: Live, vocab: int = vocab) -> dict[str, Array]:
                tokens = rng.integers(0, vocab, live.tokens).astype(np.int32)
                tokens[:2] = np.array([vocab - 1, 0], np.int32)[: live.tokens]
                return {"tokens": tokens}

            shapes: dict[str, Shape] = {"tokens": ("T",), "weight": (vocab, hidden), "y": ("T", hidden)}
            yield pair(
                f"vocab={vocab} hidden={hidden} {_count(lives[0])}", lives, shapes, make, fixed={"weight": weight},
                dtypes={"y": DType.F32},
            )  # fmt: skip


def _rowwise(
    rng: Rng, large: bool, names: tuple[str, ...], weight: str = "", attrs: Mapping[str, Any] | None = None,
    scale: float = 1.0, residual: tuple[str, ...] = (),
) -> Iterator[Trial]:  # fmt: skip
    """Ops whose rows are independent: ``names`` are inputs [N, features], the result is y, ``weight`` one vector.

    Operands named by ``residual`` are of the residual stream, which is float32.
    """
    for features in (4096, 14336) if large else (64, 33, 576, 2048):
        fixed = {weight: 1 + normal(rng, features, scale=0.3)} if weight else {}
        for lives in LARGE_ROWS if large else (*ROWS, *SEVERAL, *MIXED):
            dim = "R" if 1 < lives[0].rows != lives[0].tokens else "T"

            def make(live: Live, dim: str = dim, features: int = features) -> dict[str, Array]:
                return {
                    name: normal(rng, live.rows if dim == "R" else live.tokens, features, scale=scale) for name in names
                }

            shapes: dict[str, Shape] = dict.fromkeys((*names, "y"), (dim, features))
            shapes |= {weight: (features,)} if weight else {}
            scaled = "" if scale == 1.0 else f" scale={scale:g}"
            stream = " residual" if residual else ""
            label = f"features={features} {_count(lives[0])}{scaled}{stream}"
            yield pair(label, lives, shapes, make, fixed=fixed, attrs=attrs, dtypes=dict.fromkeys(residual, DType.F32))


def rms_norm(rng: Rng, large: bool) -> Iterator[Trial]:
    """Norms; small rows where eps matters."""
    yield from _rowwise(rng, large, ("x",), "weight", {"eps": 1e-5}, residual=("x",))
    if not large:
        yield from _rowwise(rng, large, ("x",), "weight", {"eps": 1e-5}, scale=1e-3, residual=("x",))


def add(rng: Rng, large: bool) -> Iterator[Trial]:
    """Residual sums, and sums of activations."""
    yield from _rowwise(rng, large, ("x", "z"), residual=("x", "y"))
    yield from _rowwise(rng, large, ("x", "z"))


def bias_add(rng: Rng, large: bool) -> Iterator[Trial]:
    """Biases."""
    return _rowwise(rng, large, ("x",), "bias")


def silu_mul(rng: Rng, large: bool) -> Iterator[Trial]:
    """Gates, far into both tails too."""
    yield from _rowwise(rng, large, ("gate", "up"))
    if not large:
        yield from _rowwise(rng, large, ("gate", "up"), scale=20.0)


def gelu_mul(rng: Rng, large: bool) -> Iterator[Trial]:
    """As of silu_mul."""
    return silu_mul(rng, large)


def linear(rng: Rng, large: bool) -> Iterator[Trial]:
    """Matrix products; the last sizes of each row of R are logits in float32."""
    sizes = (
        ((4096, 4096), (4096, 28672), (14336, 4096))
        if large
        else ((64, 64), (33, 17), (576, 192), (1536, 576), (4096, 128))
    )
    for columns, out in sizes:
        weight = normal(rng, out, columns, scale=columns**-0.5)
        for lives in LARGE_ROWS if large else (*ROWS, *SEVERAL, *MIXED):
            dim = "R" if 1 < lives[0].rows != lives[0].tokens else "T"

            def make(live: Live, dim: str = dim, columns: int = columns) -> dict[str, Array]:
                return {"x": normal(rng, live.rows if dim == "R" else live.tokens, columns)}

            shapes: dict[str, Shape] = {"x": (dim, columns), "weight": (out, columns), "y": (dim, out)}
            yield pair(
                f"in={columns} out={out} {_count(lives[0])}", lives, shapes, make, fixed={"weight": weight},
                dtypes={"y": DType.F32} if dim == "R" else {},
            )  # fmt: skip


def rope(rng: Rng, large: bool) -> Iterator[Trial]:
    """Whole and partial rotation; positions where float32 angles are still sharp."""
    for heads, dim, half in ((32, 128, 64),) if large else ((4, 64, 32), (3, 80, 16), (9, 64, 32), (2, 128, 64)):
        inv_freq = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
        for lives in LARGE_ROWS if large else ROWS:
            for limit, scale in ((400, 1.0), (4000, 0.2)):

                def make(
                    live: Live, limit: int = limit, scale: float = scale, width: int = heads * dim
                ) -> dict[str, Array]:
                    positions = rng.integers(0, limit, live.tokens).astype(np.int32)
                    return {"x": normal(rng, live.tokens, width, scale=scale), "positions": positions}

                shapes = {"x": ("T", heads * dim), "positions": ("T",), "inv_freq": (half,), "y": ("T", heads * dim)}
                yield pair(
                    f"heads={heads} dim={dim} rotated={2 * half} below={limit} {_count(lives[0])}", lives, shapes, make,
                    fixed={"inv_freq": inv_freq}, attrs={"heads": heads, "head_dim": dim, "scale": 1.0},
                )  # fmt: skip


def gather_rows(rng: Rng, large: bool) -> Iterator[Trial]:
    """Some rows, in any order, or none."""
    for features in (4096,) if large else (64, 33, 576):
        for lives in ((Live.mixed(32), Live.mixed(32)),) if large else (*MIXED, (Live.decode(4), Live.decode(2))):

            def make(live: Live, features: int = features) -> dict[str, Array]:
                rows = rng.permutation(live.tokens)[: live.rows].astype(np.int32)
                return {"x": normal(rng, live.tokens, features), "logits_rows": rows}

            shapes = {"x": ("T", features), "logits_rows": ("R",), "y": ("R", features)}
            residual = {"x": DType.F32, "y": DType.F32}
            yield pair(f"features={features} {_count(lives[0])}", lives, shapes, make, dtypes=residual)


Rows = tuple[tuple[int, int], ...]
"""(query, context) of each row."""
DECODE: tuple[tuple[Rows, Rows], ...] = (
    (((1, 0), (1, 15), (1, 16)), ((1, 31),)),
    (((1, 5),), ((1, 32), (1, 0), (1, 47), (1, 63))),
    (((1, 1000), (1, 3)), ((1, 17), (1, 1023))),
)
PREFILL: tuple[tuple[Rows, Rows], ...] = (
    (((5, 0), (1, 33), (0, 10), (17, 15)), ((16, 16), (3, 1))),
    (((1, 7),), ((40, 9), (1, 64), (33, 31))),
    (((70, 0),), ((64, 190),)),
)
LONG: tuple[tuple[Rows, Rows], ...] = ((((1, 4095),), ((1, 2050),)),)
TILES: tuple[Rows, Rows] = (((300, 5), (1, 700), (130, 0), (0, 3)), ((257, 130), (64, 449)))
"""Several tiles of queries and of keys, with ends inside them."""
SHARED: tuple[Rows, Rows] = (((40, 1600), (1, 30)), ((1, 1700), (33, 1560)))
"""Contexts so long beside so few queries that their keys are shared out."""
LARGE: tuple[tuple[Rows, Rows], ...] = ((((1, 4095),) * 1,) * 2, (((1, 4095),) * 8,) * 2, (((512, 0),),) * 2)


def batches(rng: Rng, rows: tuple[Rows, Rows], page_tokens: int) -> tuple[Batch, Batch]:
    """Both batches of a trial, in one shape."""
    room = max(query + context for part in rows for query, context in part)
    shape = BatchShape.for_room(max(len(part) for part in rows), room, page_tokens)
    first, second = (make_batch(rng, shape, [q for q, _ in part], [c for _, c in part]) for part in rows)
    return first, second


def _cache_attrs(batch: Batch, layer: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    layout = batch.shape.layout
    return {
        "layer": layer, "kv_heads": kv_heads, "head_dim": head_dim, "page_tokens": batch.shape.page_tokens,
        "slot_stride": layout.stride, "table_offset": layout.table_offset(0),
    }  # fmt: skip


def _longest(rows: tuple[Rows, Rows]) -> int:
    return max(1, *(query for part in rows for query, _ in part))


def kv_append(rng: Rng, large: bool) -> Iterator[Trial]:
    """Writing across page borders; everything else in the pages must stay as it is."""
    for kv_heads, dim, page_tokens in (
        ((8, 128, 64),) if large else ((1, 64, 16), (3, 64, 16), (8, 128, 32), (2, 128, 64))
    ):
        for index, rows in enumerate(LARGE if large else (*DECODE, *PREFILL)):
            cases = []
            for batch in batches(rng, rows, page_tokens):
                cache = normal(rng, 2, batch.shape.pages, 2, kv_heads, page_tokens, dim)
                arrays = {
                    "k": normal(rng, batch.tokens, kv_heads * dim), "v": normal(rng, batch.tokens, kv_heads * dim),
                    "positions": batch.positions, "token_row": batch.token_row, "row_slot": batch.row_slot,
                    "slots": batch.slots, "cache": cache,
                }  # fmt: skip
                shapes: dict[str, Shape] = {
                    "k": ("T", kv_heads * dim), "v": ("T", kv_heads * dim), "positions": ("T",), "token_row": ("T",),
                    "row_slot": ("S",), "slots": (batch.shape.layout.words,), "cache": (2, 2, kv_heads, page_tokens, dim),
                }  # fmt: skip
                label = f"kv_heads={kv_heads} dim={dim} page={page_tokens} rows={len(rows[0])} longest={_longest(rows)} #{index}"
                attrs = _cache_attrs(batch, 1, kv_heads, dim)
                cases.append(batch_case(batch, label, arrays, attrs, shapes, _longest(rows)))
            yield Trial(cases[0], cases[1])


def fill_cache(rng: Rng, batch: Batch, layers: int, layer: int, kv_heads: int, head_dim: int, window: int) -> Array:
    """Pages with values where a query may look, values out of scale where a window forbids, and NaN everywhere else.

    Recycled and fresh pages hold anything beyond the live positions, so a kernel must not let it through.
    """
    size = batch.shape.page_tokens
    cache = np.full((layers, batch.shape.pages, 2, kv_heads, size, head_dim), np.nan, np.float32)
    for row, (query, context) in enumerate(zip(batch.queries, batch.contexts, strict=True)):
        positions = np.arange(context + query)
        hidden = positions <= context - window if window else np.zeros(len(positions), bool)
        scale = np.where(hidden, 100.0, 1.0)[:, None, None, None]
        values = rng.standard_normal((len(positions), 2, kv_heads, head_dim)) * scale
        pages = np.array([batch.page(row, block) for block in range(-(-len(positions) // size))], np.int64)
        cache[layer, pages[positions // size], :, :, positions % size] = values
    return cache


def paged_attention(rng: Rng, large: bool) -> Iterator[Trial]:
    """Grouped heads, ragged and empty queries, long contexts, windows."""
    heads = ((32, 8, 128, 64),) if large else (
        (9, 3, 64, 16), (4, 4, 32, 16), (4, 1, 64, 32), (32, 8, 128, 64), (4, 1, 256, 32),
    )  # fmt: skip
    for q_heads, kv_heads, dim, page_tokens in heads:
        sets = [(rows, 0) for rows in (LARGE if large else (*DECODE, *PREFILL))]
        if not large:
            sets += [(rows, window) for rows in (DECODE[1], DECODE[2], PREFILL[0]) for window in (1, 20)]
            sets += [(rows, 0) for rows in LONG]
            sets += [(TILES, window) for window in (0, 150)]
            sets += [(SHARED, window) for window in (0, 1650)]
        for index, (rows, window) in enumerate(sets):
            label = (
                f"heads={q_heads}/{kv_heads} dim={dim} page={page_tokens} longest={_longest(rows)}"
                f" context={max(c for part in rows for _, c in part)} window={window} #{index}"
            )
            cases = []
            for batch in batches(rng, rows, page_tokens):
                arrays = {
                    "q": normal(rng, batch.tokens, q_heads * dim), "cu_q": batch.cu_q, "row_slot": batch.row_slot,
                    "slots": batch.slots, "cache": fill_cache(rng, batch, 2, 1, kv_heads, dim, window),
                }  # fmt: skip
                shapes: dict[str, Shape] = {
                    "q": ("T", q_heads * dim), "cu_q": ("S+1",), "row_slot": ("S",), "slots": (batch.shape.layout.words,),
                    "cache": (2, 2, kv_heads, page_tokens, dim), "y": ("T", q_heads * dim),
                }  # fmt: skip
                attrs = {
                    **_cache_attrs(batch, 1, kv_heads, dim),
                    "q_heads": q_heads,
                    "scale": dim**-0.5,
                    "window": window,
                }
                cases.append(batch_case(batch, label, arrays, attrs, shapes, _longest(rows)))
            yield Trial(cases[0], cases[1])


def step_begin(rng: Rng, large: bool) -> Iterator[Trial]:
    """Updates seen by the rows of the same step, fed-back tokens, repeated tokens in penalty rows, empty rows."""
    vocab = 128256 if large else 97
    for index, rows in enumerate(LARGE if large else (*DECODE, *PREFILL)):
        cases = []
        for number, batch in enumerate(batches(rng, rows, 16)):
            layout = batch.shape.layout
            penalty = rng.integers(0, 3, (layout.slots, vocab)).astype(np.int32)
            for row in range(0, len(batch.queries), 2):
                batch.slots[batch.word(row, Word.PENALTY_ROW)] = int(batch.row_slot[row])
                batch.slots[batch.word(row, Word.PROMPT_LENGTH)] = batch.contexts[row] + number
            token_ids = rng.integers(0, 7, batch.tokens).astype(np.int32)
            for row, query in enumerate(batch.queries):
                if query == 1:
                    token_ids[batch.cu_q[row]] = -1
            updates = [] if number else _updates(batch)
            arrays = {
                "updates": np.array(updates, np.int32).reshape(-1, 2), "token_ids": token_ids, "cu_q": batch.cu_q,
                "row_slot": batch.row_slot, "slots": batch.slots, "penalty": penalty,
            }  # fmt: skip
            shapes: dict[str, Shape] = {
                "updates": ("U", 2), "token_ids": ("T",), "cu_q": ("S+1",), "row_slot": ("S",), "slots": (layout.words,),
                "penalty": penalty.shape, "tokens": ("T",), "positions": ("T",), "token_row": ("T",),
            }  # fmt: skip
            label = f"rows={len(rows[0])} longest={_longest(rows)} vocab={vocab} #{index}"
            attrs = {"slot_stride": layout.stride}
            cases.append(batch_case(batch, label, arrays, attrs, shapes, _longest(rows), updates=len(updates)))
        yield Trial(cases[0], cases[1])


def _updates(batch: Batch) -> list[tuple[int, int]]:
    """New values of words that this very step reads, and of the last block of an idle slot."""
    idle = next(slot for slot in range(batch.shape.layout.slots) if slot not in batch.row_slot)
    first = [(batch.word(0, Word.LAST_TOKEN), 11), (batch.word(0, Word.POSITION), batch.contexts[0] + 1)]
    return [*first, (batch.shape.layout.block(idle, 0, batch.shape.layout.table_blocks[0] - 1), 3)]


GENERATORS: Mapping[str, Generate] = {
    "step_begin": step_begin, "embed": embed, "rms_norm": rms_norm, "add": add, "bias_add": bias_add, "linear": linear,
    "rope": rope, "kv_append": kv_append, "paged_attention": paged_attention, "silu_mul": silu_mul,
    "gelu_mul": gelu_mul,
    "gather_rows": gather_rows, **heads_cases.GENERATORS, **moe_cases.GENERATORS, **recurrent_cases.GENERATORS,
    **sampling_cases.GENERATORS,
}  # fmt: skip
