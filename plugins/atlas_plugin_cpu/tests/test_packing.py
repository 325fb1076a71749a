"""Packed bytes lie where weights.h reads them, and verdicts say why a need is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atlas_core.contracts.ops import OperandSpec, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_plugin_cpu.implementations import implementations
from atlas_plugin_cpu.packing import matrix_packing, pack

BY_OP = {implementation.name.removeprefix("cpu."): implementation for implementation in implementations()}
F32 = plain(DType.F32)
Q8_0, Q4_0, Q4_1 = (StorageLayout(name, 32, size) for name, size in (("q8_0", 34), ("q4_0", 18), ("q4_1", 20)))


def packed(layout, shape, raw):
    data = pack(f"{layout.name}_x16", layout, shape, raw.tobytes())
    assert data.nbytes == matrix_packing(layout, shape).nbytes
    return data


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([DType.F32, DType.F16, DType.BF16]))
def test_plain_scalars_are_interleaved_by_sixteen_rows(rows, columns, dtype):
    raw = np.arange(rows * columns, dtype=f"<u{dtype.itemsize}").reshape(rows, columns) + 1
    cells = packed(plain(dtype), (rows, columns), raw).view(raw.dtype).reshape(-1, columns, 16)
    for row in range(rows):
        np.testing.assert_array_equal(cells[row // 16, :, row % 16], raw[row])
    filled = cells.transpose(0, 2, 1).reshape(-1, columns)
    np.testing.assert_array_equal(filled[rows:], np.zeros((len(filled) - rows, columns)))


@given(st.integers(1, 35), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_blocks_of_q8_0(rows, blocks, seed):
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks, 34), dtype=np.uint8)
    cells = packed(Q8_0, (rows, blocks * 32), raw).reshape(-1, blocks, 544)
    for row in range(rows):
        block, lane = cells[row // 16], row % 16
        np.testing.assert_array_equal(block[:, 2 * lane : 2 * lane + 2], raw[row, :, :2])
        quads = block[:, 32:].reshape(blocks, 8, 16, 4)[:, :, lane].reshape(blocks, 32)
        np.testing.assert_array_equal(quads ^ 128, raw[row, :, 2:])


@given(st.integers(1, 35), st.integers(1, 4), st.sampled_from([Q4_0, Q4_1]), st.integers(0, 2**32 - 1))
def test_blocks_of_nibbles(rows, blocks, layout, seed):
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks, layout.block_bytes), dtype=np.uint8)
    heads = layout.block_bytes - 16
    cells = packed(layout, (rows, blocks * 32), raw).reshape(-1, blocks, 16 * layout.block_bytes)
    vectors = cells[..., 16 * heads :].reshape(-1, blocks, 4, 16, 4)
    for row in range(rows):
        lane = row % 16
        for field in range(heads // 2):
            at = 32 * field + 2 * lane
            np.testing.assert_array_equal(cells[row // 16, :, at : at + 2], raw[row, :, 2 * field : 2 * field + 2])
        for column in range(32):
            stored = raw[row, :, heads + column % 16] >> (4 if column >= 16 else 0) & 15
            got = vectors[row // 16, :, column // 8, lane, column % 4] >> (4 if column % 8 >= 4 else 0) & 15
            np.testing.assert_array_equal(got, stored)


def test_what_cannot_be_packed_says_so():
    with pytest.raises(KernelError, match="128 were expected"):
        pack("f32_x16", F32, (4, 8), bytes(127))
    with pytest.raises(KernelError, match="no such packing"):
        pack("q4_1_x16", F32, (4, 8), bytes(128))


def need(**changes):
    operands = {
        "x": OperandSpec((8, 64), DType.F32, live="T"),
        "weight": OperandSpec((48, 64), DType.U8, Q4_1),
        "y": OperandSpec((8, 48), DType.F32, live="T"),
    }
    return replace(OpNeed("linear", operands, {}, "native", "exact", 8, 8, 8, 8), **changes)


def test_embed_and_linear_share_one_copy_of_a_tied_weight():
    embed = replace(need(), op="embed", operands=need().operands | {"tokens": OperandSpec((8,), DType.I32, live="T")})
    assert BY_OP["embed"].packings(embed) == BY_OP["linear"].packings(need())


def test_exact_ranks_above_the_same_kernel_for_fast():
    exact, fast = (BY_OP["linear"].supports(need(numerics=name)) for name in ("exact", "fast"))
    assert exact.ok
    assert fast.ok
    assert exact.rank > fast.rank
    assert fast.reasons == ("the exact kernel also answers for fast numerics",)


@pytest.mark.parametrize(
    ("operand", "spec", "reason"),
    [
        ("x", OperandSpec((8, 64), DType.BF16, live="T"), "works in f32, and x is bf16"),
        ("x", OperandSpec((8, 64), DType.F32), "takes x as rows"),
        ("weight", OperandSpec((48, 64), DType.U8, StorageLayout("q2_k", 256, 84)), "weight is stored as q2_k"),
    ],
)
def test_refusals_name_the_reason(operand, spec, reason):
    verdict = BY_OP["linear"].supports(need(operands=need().operands | {operand: spec}))
    assert not verdict.ok
    assert reason in "; ".join(verdict.reasons)


def test_head_sizes_that_attention_does_not_take():
    cache = OperandSpec((1, 2, 2, 16, 12), DType.F32)
    operands = {name: OperandSpec((8, 36), DType.F32, live="T") for name in ("q", "y")} | {"cache": cache}
    attrs = {"head_dim": 12, "q_heads": 3, "kv_heads": 2, "page_tokens": 16}
    verdict = BY_OP["paged_attention"].supports(
        OpNeed("paged_attention", operands, attrs, "native", "exact", 8, 8, 8, 8)
    )
    assert len(verdict.reasons) == 2
    assert "not 12" in verdict.reasons[0]
    assert "3 query heads do not share 2 key heads evenly" in verdict.reasons[1]
