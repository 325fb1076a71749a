"""Trials of fused ops: recorded programs are run up to where a pattern matches, and what lies there is the case."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from atlas_core.conformance.decoder import ACTIVATION, Recorded
from atlas_core.contracts.ops import FusedOp
from atlas_core.model.interpreter import Interpreter
from atlas_core.model.matching import Pattern, Uses
from atlas_core.model.program import Node, Value
from atlas_core.ops.batch import Batch, BatchShape, batch_case, make_batch
from atlas_core.ops.cases import Rows, fill_cache
from atlas_core.ops.contract import Case, Op
from atlas_core.ops.step import Word
from atlas_core.ops.trials import Trial, normal

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

SCENARIOS: tuple[tuple[Rows, Rows], ...] = (
    (((1, 5), (1, 15), (1, 16)), ((1, 31),)),
    (((1, 0),), ((1, 32), (1, 100), (1, 47), (1, 63), (1, 2))),
    (((5, 0), (1, 33), (0, 10), (17, 15)), ((16, 16), (3, 1))),
)
LONG: tuple[Rows, Rows] = (((1, 40), (200, 50), (189, 30)), ((1, 21), (199, 6), (17, 90)))
"""For the first place at which a pattern matches in a model: several tiles of prompts, the last one not full."""
ALONE: tuple[tuple[Rows, Rows], ...] = ((((1, 40),), ((1, 200),)), (((1, 0),), ((1, 97),)))
"""For chains of layers, which go on for one sequence."""
LARGE_SCENARIOS: tuple[tuple[Rows, Rows], ...] = ((((1, 1000),),) * 2, (((1, 1000),) * 8,) * 2)
CLEAR, ATTEMPTS = 0.02, 200
"""Logits of chosen experts are further apart, when they are of the order of one; how often rows are drawn for that."""
MATCHES = 2
"""Places of one program at which a pattern is tried: the first ones, which differ in layer or weights."""


def fused_trials(
    fused: FusedOp, ops: Mapping[str, Op], models: Sequence[Recorded], seed: int, *, large: bool = False
) -> Iterator[tuple[Op, Trial]]:
    """The op and a trial wherever it matches; ``large`` makes up the arrays instead of computing them (good for timing only)."""
    scenarios = LARGE_SCENARIOS if large else ALONE if fused.carried else SCENARIOS
    for model in models:
        weights = _Weights(model)
        for place, (start, pattern, node) in enumerate(_matches(Pattern.of(fused, ops), model)):
            whole = any(value.shape[:1] == ("T",) for value in node.operands.values())
            long = (LONG,) if whole and not (large or fused.carried or place) else ()
            for index, rows in enumerate((*scenarios, *long)):
                rng = np.random.default_rng([seed, index, *model.label.encode()])
                cases = [
                    _case(model, weights, start, node, batch, rng, rows, large) for batch in _batches(rng, model, rows)
                ]
                for case in cases:
                    _decide(pattern.fused, ops, case, rng)
                spare = 0 if fused.carried else (2, 0, 3)[index % 3]
                yield node.op, replace(Trial(cases[0], cases[1]), spare=spare)


def _matches(pattern: Pattern, model: Recorded) -> list[tuple[int, Pattern, Node]]:
    program, uses = model.program, Uses(model.program)
    found: list[tuple[int, Pattern, Node]] = []
    for segment in program.segments:
        for start in range(segment.start, segment.end):
            matched = pattern.find(program.nodes, start, segment.end, uses)
            if matched and len(found) < MATCHES:
                found.append((start, *matched))
    return found


def _batches(rng: Rng, model: Recorded, rows: tuple[Rows, Rows]) -> list[Batch]:
    layout = model.layout.slots
    size = model.layout.page_tokens
    pages = max(sum(-(-(query + context) // size) for query, context in part) for part in rows)
    shape = BatchShape(layout, size, pages + 2)
    return [make_batch(rng, shape, [q for q, _ in part], [c for _, c in part]) for part in rows]


def _case(
    model: Recorded,
    weights: "_Weights",
    start: int,
    node: Node,
    batch: Batch,
    rng: Rng,
    rows: tuple[Rows, Rows],
    large: bool,
) -> Case:
    interpreter = Interpreter(model.program, step_values(model, batch, rng))
    if large:
        interpreter.run(0, min(start, 1))
    else:
        for name in {
            value.name for n in model.program.nodes[:start] for value in n.operands.values() if value.kind == "weight"
        }:
            interpreter.values[name] = weights[name]
        interpreter.run(0, start)
    arrays = {}
    for operand in node.op.operands:
        value = node.operands[operand.name]
        if operand.role == "out":
            continue
        if value.kind == "weight":
            arrays[operand.name] = weights[value.name]
        elif value.name in interpreter.values:
            arrays[operand.name] = interpreter.values[value.name].copy()
        else:
            arrays[operand.name] = normal(rng, *_live(value, batch))
    longest = max(query for part in rows for query, _ in part)
    shapes = {operand.name: node.operands[operand.name].shape for operand in node.op.operands}
    explicit = {
        operand.name: dtype
        for operand in node.op.operands
        if (dtype := node.operands[operand.name].dtype) and dtype is not ACTIVATION
    }
    label = f"{model.label} node={start} rows={len(rows[0])} longest={longest}"
    return batch_case(batch, label, arrays, node.attrs, shapes, max(longest, 1), dtypes=explicit)


def _decide(fused: FusedOp, ops: Mapping[str, Op], case: Case, rng: Rng) -> None:
    """Draw rows anew where rounding could change which experts they choose, or their order where that is a result."""
    if not any(call.op == "moe_route" for call in fused.body):
        return
    rows = case.arrays[fused.body[0].operands["x"]]
    unsure = np.arange(len(rows))
    for _ in range(ATTEMPTS):
        unsure = np.flatnonzero(_narrowest(fused, ops, case) < CLEAR)
        if not len(unsure):
            return
        rows[unsure] = normal(rng, len(unsure), rows.shape[1])
    raise ValueError(f"{fused.name}: {len(unsure)} rows of {case.label} leave the choice of experts open")


def _narrowest(fused: FusedOp, ops: Mapping[str, Op], case: Case) -> Array:
    """Of each row the least lead of logits that decides, over all choices of the op."""
    last = max(index for index, call in enumerate(fused.body) if call.op == "moe_route")
    narrowest = np.full(len(case.arrays[fused.body[0].operands["x"]]), np.inf)
    # What is changed in place, states and pages, stays as it is in the case.
    changed = {
        call.operands[part.name] for call in fused.body for part in ops[call.op].operands if part.role == "inout"
    }
    arrays = {name: array.copy() if name in changed else array for name, array in case.arrays.items()}
    for call in fused.body[: last + 1]:
        part = {inner: arrays[outer] for inner, outer in call.operands.items() if outer in arrays}
        attrs = {inner: case.attrs[outer] for inner, outer in call.attrs.items()}
        if call.op == "moe_route":
            logits = np.sort(part["logits"], axis=-1)[:, ::-1]
            told = call.operands["experts"] in fused.outputs
            leads = -np.diff(logits[:, 0 if told else attrs["top_k"] - 1 : attrs["top_k"] + 1], axis=-1)
            narrowest = np.minimum(narrowest, leads.min(-1, initial=np.inf))
        ops[call.op].reference(part, attrs)
        arrays.update({outer: part[inner] for inner, outer in call.operands.items()})
    return narrowest


def _live(value: Value, batch: Batch) -> tuple[int, ...]:
    counts = {"T": batch.tokens, "S": len(batch.queries), "R": sum(1 for query in batch.queries if query)}
    return tuple(dim if isinstance(dim, int) else counts[dim] for dim in value.shape)


def weight_values(model: Recorded, name: str) -> Array:
    """float32 values of one weight, the same each time: matrices keep the scale of what they multiply, vectors are near 1."""
    value = next(v for v in model.program.weights() if v.name == name)
    rng = np.random.default_rng([*name.encode(), *model.label.encode()])
    shape = tuple(int(extent) for extent in value.shape)
    if len(shape) == 1:
        return np.float32(1) + normal(rng, *shape, scale=0.2)
    return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)


class _Weights(dict[str, Array]):
    """Weights of one model, made when first wanted."""

    def __init__(self, model: Recorded) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, name: str) -> Array:
        self[name] = weight_values(self._model, name)
        return self[name]


def step_values(model: Recorded, batch: Batch, rng: Rng) -> dict[str, Array]:
    """Inputs, states and caches of one step over ``batch``; no weights. Each sequence with tokens wants logits and a sample."""
    spec, slots = model.spec, batch.shape.layout.slots
    active = np.array([row for row, query in enumerate(batch.queries) if query], np.int32)
    values: dict[str, Array] = {
        "updates": np.zeros((0, 2), np.int32),
        "token_ids": rng.integers(0, spec.vocab_size, batch.tokens).astype(np.int32),
        "cu_q": batch.cu_q,
        "row_slot": batch.row_slot,
        "logits_rows": (batch.cu_q[active + 1] - 1).astype(np.int32),
        "sample_row": active,
        "scored": np.full((len(active), 2), (-1, 0), np.int32),
        "slots": batch.slots.copy(),
        "penalty": np.zeros((model.layout.penalty_rows, spec.vocab_size), np.int32),
        "mask": np.full((slots, -(-spec.vocab_size // 32)), 2**32 - 1, np.uint32),
    }
    for row in range(len(batch.queries)):
        values["slots"][batch.word(row, Word.PROMPT_LENGTH)] = batch.contexts[row]
    recurrent = [cache for cache in spec.caches if not cache.paged]
    for cache in recurrent:
        values[f"state.{cache.group}"] = normal(rng, cache.layers, slots, *cache.state_shape)
    if recurrent:
        _fork(batch, values["slots"])
    for cache in spec.caches:
        if not cache.paged or not cache.layers:
            continue
        layers = [
            fill_cache(rng, batch, 1, 0, cache.kv_heads, cache.head_dim, cache.window or 0) for _ in range(cache.layers)
        ]
        values[f"cache.{cache.group}"] = np.concatenate(layers)
    return values


def _fork(batch: Batch, slots: Array) -> None:
    """Every other row writes its states to the place of a slot that is free."""
    free = sorted(set(range(batch.shape.layout.slots)) - set(map(int, batch.row_slot)))
    for row, place in zip(range(1, len(batch.queries), 2), free, strict=False):
        slots[batch.word(row, Word.STATE_OUT)] = place
