"""Experts and states: bits that depend on a token and its past alone, on every instruction set."""

import numpy as np
import pytest

from atlas_core.ops.batch import BatchShape, make_batch
from atlas_core.ops.primitives import PRIMITIVES

EXPERTS, TOP, HIDDEN, SIZE = 6, 2, 96, 40
HEADS, VALUES, DIM, WIDE, CHANNELS, WIDTH = 2, 4, 32, 24, 40, 4
KEYS = 2 * HEADS * DIM
SHAPE = BatchShape.for_room(3, 64, 16)


def bits(array):
    return array.view(np.uint32)


@pytest.fixture(scope="module")
def experts():
    rng = np.random.default_rng(1)
    return {
        "gate": rng.standard_normal((EXPERTS, SIZE, HIDDEN), np.float32) / 10,
        "up": rng.standard_normal((EXPERTS, SIZE, HIDDEN), np.float32) / 10,
        "down": rng.standard_normal((EXPERTS, HIDDEN, SIZE), np.float32) / 6,
    }


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(2)
    return {
        "x": rng.standard_normal((21, HIDDEN), np.float32),
        # Expert 5 gets one token, expert 0 most of them: tiles of every size.
        "experts": np.array([[0, 1 + row % 4] if row else [5, 0] for row in range(21)], np.int32),
        "weights": rng.random((21, TOP), np.float32),
    }


def mix(bench, make_weight, make_step, experts, tokens, rows):
    picked = {name: array[rows] for name, array in tokens.items()}
    arrays = {**picked, **{name: make_weight.plain(array) for name, array in experts.items()}}
    count = len(picked["x"])
    step = make_step(tokens=count, live=dict.fromkeys(("x", "experts", "weights", "y"), "T"))
    return bench.run("moe_experts", arrays, {}, step, {"y": ((count, HIDDEN), np.float32)})["y"]


def test_a_token_gets_the_same_from_its_experts_alone_and_in_company(bench, make_weight, make_step, experts, tokens):
    together = mix(bench, make_weight, make_step, experts, tokens, slice(None))
    want = {**tokens, **experts}
    PRIMITIVES["moe_experts"].reference(want, {})
    np.testing.assert_allclose(together, want["y"], rtol=1e-5, atol=1e-5)
    for rows in ([0], [7], [3, 0], [20, 4, 11], list(range(9))):
        part = mix(bench, make_weight, make_step, experts, tokens, rows)
        np.testing.assert_array_equal(bits(part), bits(together[rows]))


def test_nobodys_experts(bench, make_weight, make_step, experts, tokens):
    assert mix(bench, make_weight, make_step, experts, tokens, slice(0)).shape == (0, HIDDEN)


@pytest.fixture(scope="module")
def sequence():
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((13, 2 * HEADS, DIM), np.float32)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    values = rng.standard_normal((13, VALUES * WIDE), np.float32)
    return {
        "x": rng.standard_normal((13, CHANNELS), np.float32),
        "qkv": np.concatenate([keys.reshape(13, KEYS), values], axis=-1),
        "a": rng.standard_normal((13, VALUES), np.float32), "b": rng.standard_normal((13, VALUES), np.float32),
    }  # fmt: skip


OPS = {
    "causal_conv1d": (("x",), (WIDTH - 1, CHANNELS), CHANNELS, {}),
    "gated_delta_rule": (("qkv", "a", "b"), (VALUES, DIM, WIDE), VALUES * WIDE, {
        "key_heads": HEADS, "value_heads": VALUES, "key_dim": DIM, "value_dim": WIDE, "scale": DIM**-0.5,
    }),
}  # fmt: skip


def weights_of(op, make_weight):
    rng = np.random.default_rng(4)
    if op == "causal_conv1d":
        return {"weight": make_weight.plain(rng.standard_normal((CHANNELS, WIDTH), np.float32))}
    return {name: make_weight.plain(rng.standard_normal(VALUES, np.float32)) for name in ("a_log", "dt_bias")}


def advance(bench, op, make_weight, make_step, sequence, state, start, rows):
    """Runs rows of (first, last) tokens, each after ``start``; a fresh one has state NaN before. Returns results and state."""
    names, _, width, attrs = OPS[op]
    batch = make_batch(np.random.default_rng(0), SHAPE, [last - first for first, last in rows], [start] * len(rows))
    picked = {name: np.concatenate([sequence[name][first:last] for first, last in rows]) for name in names}
    arrays = {
        **picked, **weights_of(op, make_weight), "cu_q": batch.cu_q, "row_slot": batch.row_slot, "slots": batch.slots,
        "state": state,
    }  # fmt: skip
    live = {**dict.fromkeys((*names, "y"), "T"), "cu_q": "S", "row_slot": "S"}
    step = make_step(tokens=batch.tokens, sequences=len(rows), live=live, max_query=13)
    full = {**attrs, "layer": 0, "slot_stride": SHAPE.layout.stride}
    found = bench.run(op, arrays, full, step, {"y": ((batch.tokens, width), np.float32)})
    return found["y"], found["state"]


@pytest.mark.parametrize("op", OPS)
def test_a_sequence_in_pieces_and_in_company_gets_the_same_bits(bench, make_weight, make_step, sequence, op):
    nothing = np.full((1, SHAPE.layout.slots, *OPS[op][1]), np.nan, np.float32)
    run = (bench, op, make_weight, make_step, sequence)
    whole, after = advance(*run, nothing, 0, [(0, 13)])
    assert np.isfinite(whole).all(), "a fresh start took over what its slot held"
    state, pieces = nothing, []
    for first, last in ((0, 5), (5, 6), (6, 13)):
        y, state = advance(*run, state, first, [(first, last)])
        pieces.append(y)
    np.testing.assert_array_equal(bits(np.concatenate(pieces)), bits(whole))
    np.testing.assert_array_equal(bits(state), bits(after))
    company, _ = advance(*run, nothing, 0, [(0, 13), (4, 4), (2, 9)])
    np.testing.assert_array_equal(bits(company[:13]), bits(whole))


def test_every_instruction_set_gives_the_same_bits(benches, make_weight, make_step, experts, tokens, sequence):
    pairs = [[mix(bench, make_weight, make_step, experts, tokens, slice(None)) for bench in benches]]
    for op in OPS:
        state = np.zeros((1, SHAPE.layout.slots, *OPS[op][1]), np.float32)
        runs = [advance(bench, op, make_weight, make_step, sequence, state, 0, [(0, 13)]) for bench in benches]
        pairs += zip(*runs, strict=True)
    for first, second in pairs:
        np.testing.assert_array_equal(bits(first), bits(second))
