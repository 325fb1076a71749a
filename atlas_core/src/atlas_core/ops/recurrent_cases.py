"""Conformance trials of ops with recurrent states: fresh and continued rows, rows without tokens, long rows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from atlas_core.ops.batch import Batch, BatchShape, batch_case, make_batch
from atlas_core.ops.step import Word
from atlas_core.ops.trials import Array, Generate, Rng, Shape, Trial, normal

Rows = tuple[tuple[int, int], ...]
"""(query, context) of each row; a context of 0 is a fresh start."""
_ROWS: tuple[tuple[Rows, Rows], ...] = (
    (((1, 0), (1, 15), (1, 16)), ((1, 31),)),
    (((1, 5),), ((1, 32), (1, 0), (1, 47), (1, 1))),
    (((5, 0), (1, 33), (0, 10), (17, 15), (0, 0)), ((16, 16), (3, 1), (2, 0))),
    (((70, 0),), ((130, 190),)),
)
_LARGE: tuple[tuple[Rows, Rows], ...] = ((((1, 99),) * 1,) * 2, (((1, 99),) * 8,) * 2, (((512, 0),),) * 2)
_LAYERS, _LAYER = 2, 1
_PAGE = 16

Fill = Callable[[Batch], tuple[dict[str, Array], dict[str, Shape], dict[str, Any]]]
"""A batch → an op's own arrays, their shapes, and its own attrs."""


def _trials(
    rng: Rng, large: bool, label: str, state: tuple[int, ...], fixed: Mapping[str, Array], fill: Fill
) -> Iterator[Trial]:
    """Trials over batches; states hold values everywhere, so that a fresh start that takes them over shows."""
    for index, rows in enumerate(_LARGE if large else _ROWS):
        room = max(query + context for part in rows for query, context in part)
        shape = BatchShape.for_room(max(len(part) for part in rows), room, _PAGE)
        longest = max(1, *(query for part in rows for query, _ in part))
        cases = []
        for part in rows:
            batch = make_batch(rng, shape, [q for q, _ in part], [c for _, c in part])
            places = _place(rng, batch)
            arrays, shapes, attrs = fill(batch)
            full = (_LAYERS, places, *state)
            arrays |= {
                **fixed, "cu_q": batch.cu_q, "row_slot": batch.row_slot, "slots": batch.slots, "state": normal(rng, *full),
            }  # fmt: skip
            shapes |= {
                **{name: array.shape for name, array in fixed.items()}, "cu_q": ("S+1",), "row_slot": ("S",),
                "slots": (shape.layout.words,), "state": full,
            }  # fmt: skip
            attrs |= {"layer": _LAYER, "slot_stride": shape.layout.stride}
            text = f"{label} rows={len(rows[0])} longest={longest} #{index}"
            cases.append(batch_case(batch, text, arrays, attrs, shapes, longest))
        yield Trial(cases[0], cases[1])


def _place(rng: Rng, batch: Batch) -> int:
    """Gives every slot a place for its state, every other row one to read and another to write; returns how many there are."""
    layout = batch.shape.layout
    places = rng.permutation(2 * layout.slots).astype(np.int32)
    for slot in range(layout.slots):
        for field in (Word.STATE_IN, Word.STATE_OUT):
            batch.slots[layout.word(slot, field)] = places[slot]
    for row in range(1, len(batch.queries), 2):
        batch.slots[batch.word(row, Word.STATE_OUT)] = places[layout.slots + int(batch.row_slot[row])]
    return 2 * layout.slots


def causal_conv1d(rng: Rng, large: bool) -> Iterator[Trial]:
    """Rows shorter and longer than the filter."""
    for channels, width in ((8192, 4),) if large else ((64, 4), (33, 2), (160, 4), (48, 7)):

        def fill(batch: Batch, channels: int = channels) -> tuple[dict[str, Array], dict[str, Shape], dict[str, Any]]:
            return {"x": normal(rng, batch.tokens, channels)}, {"x": ("T", channels), "y": ("T", channels)}, {}

        fixed = {"weight": normal(rng, channels, width, scale=width**-0.5)}
        yield from _trials(rng, large, f"channels={channels} width={width}", (width - 1, channels), fixed, fill)


def gated_delta_rule(rng: Rng, large: bool) -> Iterator[Trial]:
    """Keys of length one, as they come; decays from nearly none to nearly all."""
    sizes = ((16, 32, 128, 128),) if large else ((2, 4, 16, 16), (1, 3, 32, 16), (4, 4, 64, 32), (2, 4, 128, 128))
    for key_heads, value_heads, key_dim, value_dim in sizes:
        keys, values = 2 * key_heads * key_dim, value_heads * value_dim

        def fill(
            batch: Batch, sizes: tuple[int, int, int, int] = (key_heads, value_heads, key_dim, value_dim),
            keys: int = keys, values: int = values,
        ) -> tuple[dict[str, Array], dict[str, Shape], dict[str, Any]]:  # fmt: skip
            heads, many, dim, value_dim = sizes
            unit = normal(rng, batch.tokens, 2 * heads, dim)
            unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
            qkv = np.concatenate([unit.reshape(batch.tokens, keys), normal(rng, batch.tokens, values)], axis=-1)
            arrays = {"qkv": qkv, "a": normal(rng, batch.tokens, many), "b": normal(rng, batch.tokens, many)}
            shapes: dict[str, Shape] = {
                "qkv": ("T", keys + values), "a": ("T", many), "b": ("T", many), "y": ("T", values),
            }  # fmt: skip
            attrs = {
                "key_heads": heads, "value_heads": many, "key_dim": dim, "value_dim": value_dim, "scale": dim**-0.5,
            }  # fmt: skip
            return arrays, shapes, attrs

        fixed = {
            "a_log": np.log(rng.uniform(0.01, 8, value_heads)).astype(np.float32), "dt_bias": normal(rng, value_heads),
        }  # fmt: skip
        label = f"heads={key_heads}/{value_heads} dims={key_dim}/{value_dim}"
        yield from _trials(rng, large, label, (value_heads, key_dim, value_dim), fixed, fill)


GENERATORS: Mapping[str, Generate] = {"causal_conv1d": causal_conv1d, "gated_delta_rule": gated_delta_rule}
