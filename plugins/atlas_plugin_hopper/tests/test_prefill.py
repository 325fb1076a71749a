"""How attention of prompts is launched."""

import pytest
from checking import CheckingBackend
from msgspec.structs import replace

from atlas_core.contracts.ops import BindContext, Buffer, OperandSpec, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_plugin_hopper.prefill import WarpgroupPrefill

STATIC = 2048
"""No less shared memory than the kernel has besides."""


@pytest.mark.parametrize(("head_dim", "groups", "workers"), [(128, 2, 132), (64, 2, 114), (256, 2, 160)])
def test_attention_has_a_block_a_processor_and_places_for_what_blocks_share(
    head_dim: int, groups: int, workers: int
) -> None:
    tokens, sequences = 384, 40
    attrs = {
        "layer": 0, "kv_heads": 8, "q_heads": 32, "head_dim": head_dim, "page_tokens": 64, "window": 0, "slot_stride": 300,
        "table_offset": 20, "scale": 0.1,
    }  # fmt: skip
    operands = {
        "q": OperandSpec((tokens, 32 * head_dim), DType.BF16, live="T"),
        "cu_q": OperandSpec((sequences + 1,), DType.I32, live="S+1"),
        "row_slot": OperandSpec((sequences,), DType.I32, live="S"),
        "slots": OperandSpec((12000,), DType.I32),
        "cache": OperandSpec((1, 2, 8, 64, head_dim), DType.BF16),
        "y": OperandSpec((tokens, 32 * head_dim), DType.BF16, live="T"),
    }
    need = OpNeed("paged_attention", operands, attrs, "sm_90a", "fast", tokens, sequences, 1, tokens, "hnd_bf16")
    attention = WarpgroupPrefill(head_dim)
    assert attention.supports(need).ok
    # Of each thread half of a head's sums, two maxima and two totals, twice a block.
    assert attention.scratch_bytes(need) == 132 * 2 * groups * 128 * (head_dim // 2 + 4) * 4
    kept: list[bytes] = []
    given = {name: Buffer(1 << 20, 1 << 30) for name in operands}
    scratch = Buffer(1 << 13, attention.scratch_bytes(need))
    context = BindContext(
        CheckingBackend(STATIC), given, 1 << 12, scratch, workers, lambda data: kept.append(data) or 1 << 14
    )
    (launch,) = attention.bind(need, context)
    blocks = min(workers, 132)
    assert launch.geometry.grid == (blocks, 1, 1)
    assert kept == [bytes(4 + 4 * blocks * groups)]
    assert not attention.supports(replace(need, sequences=1025)).ok
