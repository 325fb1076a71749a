"""Dense ops against their references at odd sizes, and the promise that bits do not depend on company."""

import numpy as np
import pytest

from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain

T = {"x": "T", "y": "T", "z": "T", "tokens": "T", "positions": "T", "gate": "T", "up": "T"}
LAYOUTS = {
    "f32": plain(DType.F32),
    "bf16": plain(DType.BF16),
    "f16": plain(DType.F16),
    "q8_0": StorageLayout("q8_0", 32, 34),
    "q4_0": StorageLayout("q4_0", 32, 18),
    "q4_1": StorageLayout("q4_1", 32, 20),
}


def stored(name, shape, seed, make_weight):
    """A random weight in a storage, made together with what it means."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    layout = LAYOUTS[name]
    if layout.scalar is not None:
        values = rng.standard_normal(shape, np.float32)
        if name == "bf16":
            half = (values.view(np.uint32) >> 16).astype(np.uint16)
            return make_weight((half.astype(np.uint32) << 16).view(np.float32), half.tobytes(), layout)
        if name == "f16":
            half = values.astype(np.float16)
            return make_weight(half.astype(np.float32), half.tobytes(), layout)
        return make_weight(values, values.tobytes(), layout)
    blocks = columns // 32
    scale = ((rng.random((rows, blocks)) + 0.01) / (1024 if name == "q8_0" else 16)).astype(np.float16)[..., None]
    wide = scale.astype(np.float32)
    raw = np.zeros((rows, blocks, layout.block_bytes), np.uint8)
    raw[..., :2] = scale.view(np.uint8)
    if name == "q8_0":
        quants = rng.integers(-128, 128, (rows, blocks, 32)).astype(np.int8)
        raw[..., 2:] = quants.view(np.uint8)
        return make_weight((quants * wide).reshape(shape), raw.tobytes(), layout)
    quants = rng.integers(0, 16, (rows, blocks, 32)).astype(np.uint8)
    raw[..., -16:] = quants[..., :16] | quants[..., 16:] << 4
    if name == "q4_0":
        return make_weight(((quants.astype(np.float32) - 8) * wide).reshape(shape), raw.tobytes(), layout)
    minimum = (-8 * wide * (0.9 + 0.2 * rng.random(wide.shape))).astype(np.float16)
    raw[..., 2:4] = minimum.view(np.uint8)
    return make_weight((quants * wide + minimum.astype(np.float32)).reshape(shape), raw.tobytes(), layout)


def close(op, got, want):
    tolerance = PRIMITIVES[op].tolerances[DType.F32]
    np.testing.assert_allclose(got, want, rtol=tolerance.relative, atol=tolerance.absolute)


def reference(op, arrays, attrs):
    local = {name: getattr(value, "values", value) for name, value in arrays.items()}
    PRIMITIVES[op].reference(local, attrs)
    return local["y"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("tokens", "columns", "outputs"),
    [(1, 64, 5), (1, 576, 192), (2, 32, 33), (7, 96, 50), (13, 320, 16), (27, 544, 81)],
)
def test_linear(bench, make_weight, make_step, layout, tokens, columns, outputs):
    x = np.random.default_rng(1).standard_normal((tokens, columns), np.float32) / np.float32(np.sqrt(columns))
    arrays = {"x": x, "weight": stored(layout, (outputs, columns), 2, make_weight)}
    got = bench.run("linear", arrays, {}, make_step(tokens=tokens, live=T), {"y": ((tokens, outputs), np.float32)})
    close("linear", got["y"], reference("linear", arrays, {}))


@pytest.mark.parametrize("layout", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("columns", [1, 31, 33, 300])
def test_linear_with_columns_that_fill_no_block(bench, make_weight, make_step, layout, columns):
    x = np.random.default_rng(3).standard_normal((3, columns), np.float32) / np.float32(np.sqrt(columns))
    arrays = {"x": x, "weight": stored(layout, (17, columns), 4, make_weight)}
    got = bench.run("linear", arrays, {}, make_step(tokens=3, live=T), {"y": ((3, 17), np.float32)})
    close("linear", got["y"], reference("linear", arrays, {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_gives_the_same_bits_alone_and_in_any_number_of_rows(bench, make_weight, make_step, layout):
    weight = stored(layout, (83, 640), 5, make_weight)
    x = np.random.default_rng(6).standard_normal((64, 640), np.float32)

    def run(rows):
        step = make_step(tokens=len(rows), live=T)
        return bench.run("linear", {"x": rows, "weight": weight}, {}, step, {"y": ((len(rows), 83), np.float32)})["y"]

    whole = run(x)
    for size in (1, 2, 3, 5, 7, 8, 11, 12, 13, 24):
        np.testing.assert_array_equal(run(x[:size]).view(np.uint32), whole[:size].view(np.uint32), str(size))


def test_linear_counts_rows_of_logits_when_its_input_says_so(bench, make_weight, make_step):
    weight = stored("f32", (20, 32), 7, make_weight)
    x = np.random.default_rng(8).standard_normal((2, 32), np.float32)
    arrays = {"x": x, "weight": weight}
    step = make_step(tokens=9, rows=2, live={"x": "R", "y": "R"})
    got = bench.run("linear", arrays, {}, step, {"y": ((2, 20), np.float32)})
    close("linear", got["y"], reference("linear", arrays, {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embed(bench, make_weight, make_step, layout):
    tokens = np.array([0, 16, 36, 5, 36, 15], np.int32)
    arrays = {"tokens": tokens, "weight": stored(layout, (37, 96), 9, make_weight)}
    got = bench.run("embed", arrays, {}, make_step(tokens=6, live=T), {"y": ((6, 96), np.float32)})
    np.testing.assert_array_equal(got["y"], reference("embed", arrays, {}))


@pytest.mark.parametrize("layout", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("columns", [1, 16, 100, 576])
def test_rms_norm(bench, make_weight, make_step, layout, columns):
    weight = stored(layout, (1, columns), 11, make_weight)
    weight.values = weight.values[0]
    arrays = {"x": (np.random.default_rng(10).standard_normal((5, columns)) * 30).astype(np.float32), "weight": weight}
    got = bench.run("rms_norm", arrays, {"eps": 1e-5}, make_step(tokens=5, live=T), {"y": ((5, columns), np.float32)})
    close("rms_norm", got["y"], reference("rms_norm", arrays, {"eps": 1e-5}))


def test_rms_norm_of_zeros_is_zero(bench, make_weight, make_step):
    arrays = {"x": np.zeros((2, 40), np.float32), "weight": make_weight.plain(np.ones(40, np.float32))}
    got = bench.run("rms_norm", arrays, {"eps": 1e-6}, make_step(tokens=2, live=T), {"y": ((2, 40), np.float32)})
    np.testing.assert_array_equal(got["y"], np.zeros((2, 40)))


@pytest.mark.parametrize("op", ["add", "silu_mul", "bias_add"])
@pytest.mark.parametrize("columns", [3, 16, 50])
def test_elementwise(bench, make_weight, make_step, op, columns):
    rng = np.random.default_rng(12)
    first, second = (rng.standard_normal((9, columns)).astype(np.float32) * 8 for _ in range(2))
    arrays = {
        "add": {"x": first, "z": second},
        "silu_mul": {"gate": first, "up": second},
        "bias_add": {"x": first, "bias": make_weight.plain(second[0])},
    }[op]
    got = bench.run(op, arrays, {}, make_step(tokens=9, live=T), {"y": ((9, columns), np.float32)})
    local = {name: getattr(value, "values", value) for name, value in arrays.items()}
    PRIMITIVES[op].reference(local, {})
    close(op, got["y"], local["y"])


def test_silu_far_from_zero(bench, make_step):
    gate = np.array([[-1e4, -100, -88.5, -20, 0, 20, 88.5, 1e4]], np.float32)
    arrays = {"gate": gate, "up": np.ones_like(gate)}
    got = bench.run("silu_mul", arrays, {}, make_step(tokens=1, live=T), {"y": (gate.shape, np.float32)})
    want = gate.astype(np.float64) / (1 + np.exp(np.minimum(-gate.astype(np.float64), 700)))
    np.testing.assert_allclose(got["y"], want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotated", "scale"), [(3, 64, 64, 1.0), (2, 80, 40, 1.3), (1, 256, 256, 1.0), (5, 8, 8, 1.0)]
)
def test_rope(bench, make_step, heads, head_dim, rotated, scale):
    positions = np.array([0, 1, 2, 77, 8191, 131071, 1000003], np.int32)
    inv_freq = (1e5 ** -(np.arange(0, rotated, 2) / rotated)).astype(np.float32)
    x = np.random.default_rng(13).standard_normal((7, heads * head_dim)).astype(np.float32)
    arrays = {"x": x, "positions": positions, "inv_freq": inv_freq}
    attrs = {"heads": heads, "head_dim": head_dim, "scale": scale}
    got = bench.run("rope", arrays, attrs, make_step(tokens=7, live=T), {"y": (x.shape, np.float32)})
    # Far below the op's tolerance: angles are doubles, so late positions are as good as early ones.
    np.testing.assert_allclose(got["y"], reference("rope", arrays, attrs), rtol=1e-6, atol=1e-6)


def test_gather_rows(bench, make_step):
    x = np.random.default_rng(14).standard_normal((6, 24)).astype(np.float32)
    arrays = {"x": x, "logits_rows": np.array([5, 0, 5], np.int32)}
    step = make_step(tokens=6, rows=3, live={"x": "T", "logits_rows": "R", "y": "R"})
    got = bench.run("gather_rows", arrays, {}, step, {"y": ((3, 24), np.float32)})
    np.testing.assert_array_equal(got["y"], x[[5, 0, 5]])


def test_a_step_without_tokens_touches_nothing(bench, make_weight, make_step):
    arrays = {"x": np.zeros((0, 64), np.float32), "weight": stored("q4_1", (40, 64), 15, make_weight)}
    got = bench.run("linear", arrays, {}, make_step(tokens=0, live=T), {"y": ((0, 40), np.float32)})
    assert got["y"].shape == (0, 40)


def test_every_instruction_set_gives_the_same_bits(benches, make_weight, make_step):
    x = np.random.default_rng(16).standard_normal((5, 320), np.float32)
    found = {}
    for layout in LAYOUTS:
        arrays = {"x": x, "weight": stored(layout, (37, 320), 17, make_weight)}
        step, outputs = make_step(tokens=5, live=T), {"y": ((5, 37), np.float32)}
        found[layout] = [bench.run("linear", arrays, {}, step, outputs)["y"].view(np.uint32) for bench in benches]
    gate = np.random.default_rng(18).standard_normal((5, 83), np.float32) * 9
    arrays, outputs = {"gate": gate, "up": gate}, {"y": (gate.shape, np.float32)}
    found["silu_mul"] = [bench.run("silu_mul", arrays, {}, step, outputs)["y"].view(np.uint32) for bench in benches]
    for name, (first, second) in found.items():
        np.testing.assert_array_equal(first, second, name)
