"""Fast numerics: close to the reference, and the same bits alone, in company, and by every instruction of this machine."""

import numpy as np
import pytest

from atlas_core.contracts.ops import OperandSpec, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_plugin_cpu import fast
from atlas_plugin_cpu.implementations import implementations
from atlas_plugin_cpu.packing import MATRIX_LAYOUTS

T = {"x": "T", "y": "T"}
SIZES = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q4_k": (256, 144),
    "q5_k": (256, 176), "q6_k": (256, 210), "iq4_xs": (256, 136),
}  # fmt: skip
HALVES = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


def stored(name, shape, make_weight, bench, make_step):
    """Random blocks with small scales. What they mean is read off by the exact kernel, from a product with a unit matrix."""
    block, nbytes = SIZES[name]
    raw = np.random.default_rng(3).integers(0, 256, (shape[0], shape[1] // block, nbytes), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        scales = np.random.default_rng(at).uniform(2**-9, 2**-7, raw.shape[:2]).astype("<f2")
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    weight = make_weight(np.zeros(shape, np.float32), raw.tobytes(), StorageLayout(name, block, nbytes))
    unit = np.eye(shape[1], dtype=np.float32)
    step, outputs = make_step(tokens=len(unit), live=T), {"y": ((len(unit), shape[0]), np.float32)}
    weight.values = bench.run("linear", {"x": unit, "weight": weight}, {}, step, outputs)["y"].T.copy()
    return weight


@pytest.mark.parametrize("layout", fast.LAYOUTS)
def test_products_with_every_layout(bench, make_weight, make_step, layout):
    weight = stored(layout, (83, 512), make_weight, bench, make_step)
    x = np.random.default_rng(4).standard_normal((70, 512), np.float32)

    def run(rows):
        step, outputs = make_step(tokens=len(rows), live=T), {"y": ((len(rows), 83), np.float32)}
        return bench.run("fast_linear", {"x": rows, "weight": weight}, {}, step, outputs, numerics="fast")["y"]

    whole = run(x)
    want = x.astype(np.float64) @ weight.values.astype(np.float64).T
    size = np.sqrt(np.mean(want**2))
    assert np.abs(whole - want).max() < 0.04 * size
    assert np.sqrt(np.mean((whole - want) ** 2)) < 0.008 * size
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 28, 29, 33):
        np.testing.assert_array_equal(run(x[:rows]).view(np.uint32), whole[:rows].view(np.uint32), str(rows))


def test_every_instruction_set_gives_the_same_bits(benches, bench, make_weight, make_step):
    x = np.random.default_rng(5).standard_normal((37, 512), np.float32)
    for layout in fast.LAYOUTS:
        arrays = {"x": x, "weight": stored(layout, (41, 512), make_weight, bench, make_step)}
        step, outputs = make_step(tokens=37, live=T), {"y": ((37, 41), np.float32)}
        found = [one.run("fast_linear", arrays, {}, step, outputs, numerics="fast")["y"] for one in benches]
        np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32), layout)


@pytest.mark.parametrize("layout", fast.LAYOUTS)
def test_logits_with_every_layout(bench, make_weight, make_step, layout):
    weight = stored(layout, (83, 512), make_weight, bench, make_step)
    x = np.random.default_rng(6).standard_normal((37, 512), np.float32)

    def run(rows):
        live = {"x": "R", "y": "R"}
        step, outputs = make_step(rows=len(rows), live=live), {"y": ((len(rows), 83), np.float32)}
        return bench.run("fast_head", {"x": rows, "weight": weight}, {}, step, outputs, numerics="fast")["y"]

    whole = run(x)
    want = x.astype(np.float64) @ weight.values.astype(np.float64).T
    assert np.sqrt(np.mean((whole - want) ** 2)) < 0.0001 * np.sqrt(np.mean(want**2))
    for rows in (1, 2, 3, 5, 8):
        np.testing.assert_array_equal(run(x[:rows]).view(np.uint32), whole[:rows].view(np.uint32), str(rows))


def test_rows_of_zeros_give_zeros(bench, make_weight, make_step):
    weight = stored("q4_0", (16, 64), make_weight, bench, make_step)
    step, outputs = make_step(tokens=2, live=T), {"y": ((2, 16), np.float32)}
    arrays = {"x": np.zeros((2, 64), np.float32), "weight": weight}
    got = bench.run("fast_linear", arrays, {}, step, outputs, numerics="fast")["y"]
    np.testing.assert_array_equal(got, np.zeros((2, 16)))


def need(layout, numerics, live="T"):
    operands = {
        "x": OperandSpec((8, 256), DType.F32, live=live), "weight": OperandSpec((48, 256), DType.U8, layout),
        "y": OperandSpec((8, 48), DType.F32, live=live),
    }  # fmt: skip
    return OpNeed("linear", operands, {}, "native", numerics, 8, 8, 8, 8)


def test_exact_numerics_and_plain_weights_are_refused():
    q4 = StorageLayout("q4_0", 32, 18)
    assert fast.FastLinear().supports(need(q4, "fast")).ok
    assert "exact numerics do not" in fast.FastLinear().supports(need(q4, "exact")).reasons[0]
    assert "weight is stored as bf16" in fast.FastLinear().supports(need(plain(DType.BF16), "fast")).reasons[0]


def test_logits_and_other_rows_have_implementations_of_their_own():
    q4 = StorageLayout("q4_0", 32, 18)
    for rows, other, live in ((fast.FastLinear(), fast.FastHead(), "T"), (fast.FastHead(), fast.FastLinear(), "R")):
        assert rows.supports(need(q4, "fast", live)).ok
        assert not other.supports(need(q4, "fast", live)).ok


def test_every_block_layout_of_the_exact_kernels_has_a_fast_one():
    assert set(fast.LAYOUTS) == {name for name in MATRIX_LAYOUTS if name not in ("f32", "f16", "bf16")}


def attention_need(layout, numerics):
    shapes = {"q": (8, 128), "residual": (8, 64), "y": (8, 64), "cache": (2, 3, 2, 1, 16, 64)}
    operands = {name: OperandSpec(shape, DType.F32, live="T" * (len(shape) == 2)) for name, shape in shapes.items()}
    operands["weight"] = OperandSpec((64, 128), DType.U8, layout)
    attrs = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "page_tokens": 16}
    return OpNeed("attention_linear_add", operands, attrs, "native", numerics, 8, 8, 8, 8)


def test_attention_rounds_only_before_a_weight_that_is_stored_in_blocks():
    q4, fused = StorageLayout("q4_0", 32, 18), fast.FastAttentionLinearAdd()
    assert fused.supports(attention_need(q4, "fast")).ok
    assert "weight is stored as f32" in fused.supports(attention_need(plain(DType.F32), "fast")).reasons[0]
    assert "exact numerics do not" in fused.supports(attention_need(q4, "exact")).reasons[0]
    # Nothing else rounds it: the primitive alone is exact in all numerics.
    owners = [found for found in implementations() if found.op == "paged_attention"]
    assert [found.name for found in owners] == ["cpu.paged_attention"]
