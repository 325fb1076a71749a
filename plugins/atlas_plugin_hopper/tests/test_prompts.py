"""Which tiles products of prompts have, what their clusters share, and how they hand sums over. No GPU is needed."""

import pytest
from checking import H100, CheckingBackend
from msgspec.structs import replace

from atlas_core.contracts.ops import BindContext, Buffer, OperandSpec, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry
from atlas_core.vocab.layout import plain
from atlas_plugin_hopper.prompt_layers import (
    GATE_UP,
    HEADS,
    NARROW_HEADS,
    PAIRS,
    QKV,
    SLIM,
    STAGED_HEADS,
    TALL,
    TALL_HEADS,
    UNNORMED,
    WHOLE,
)
from atlas_plugin_hopper.prompts import (
    INSTANCES,
    LEAN,
    NARROW,
    NARROW_PARTS,
    TALL_PARTS,
    WIDE,
    CopiedByEngine,
    Tiles,
    tokens_map,
)

STATIC = 4096
"""Bytes of shared memory that a kernel has of its own, at most."""


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "chosen"),
    [
        (256, 4096, 14336, NARROW_PARTS),
        (384, 4096, 14336, TALL_PARTS),
        (320, 4096, 4096, TALL_PARTS),
        (384, 4096, 4096, LEAN),
        (512, 4096, 4096, NARROW),
        (2048, 1024, 4096, NARROW),
        (2048, 4096, 4096, WIDE),
        (8192, 1024, 4096, WIDE),
    ],
)
def test_products_of_prompts_have_the_tiles_that_fill_the_machine(
    tokens: int, rows: int, width: int, chosen: Tiles
) -> None:
    best = min(INSTANCES, key=lambda tiles: tiles.time(tokens, rows, width))
    assert best is chosen
    assert best.busy(tokens, rows) > 0.9


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [(256, SLIM), (257, WHOLE), (320, WHOLE), (321, TALL), (384, TALL), (385, SLIM), (512, SLIM), (2048, WIDE)],
)
def test_gate_and_up_have_the_tiles_that_the_fewest_groups_of_tokens_leave_empty(tokens: int, chosen: Tiles) -> None:
    best = min(GATE_UP, key=lambda tiles: tiles.time(tokens, 2 * 14336, 4096))
    assert best is chosen


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "normed", "unnormed"),
    [
        (256, 6144, 4096, NARROW_HEADS, NARROW_HEADS),
        (257, 6144, 4096, TALL_HEADS, PAIRS),
        (384, 6144, 4096, TALL_HEADS, PAIRS),
        (512, 6144, 4096, HEADS, HEADS),
        (2048, 6144, 4096, HEADS, HEADS),
        (8192, 6144, 4096, STAGED_HEADS, STAGED_HEADS),
        (2048, 5120, 2048, NARROW_HEADS, NARROW_HEADS),
        (8192, 5120, 2048, STAGED_HEADS, STAGED_HEADS),
    ],
)
def test_q_k_v_have_the_tiles_that_fill_the_machine(
    tokens: int, rows: int, width: int, normed: Tiles, unnormed: Tiles
) -> None:
    assert min(QKV[128], key=lambda tiles: tiles.time(tokens, rows, width)) is normed
    assert min(UNNORMED[128], key=lambda tiles: tiles.time(tokens, rows, width)) is unnormed


@pytest.mark.parametrize(
    ("tiles", "tokens", "columns", "x_box", "weight_box", "clusters", "threads"),
    [
        (WIDE, 512, 16, 128, 128, 32, 384),
        (TALL_PARTS, 384, 32, 96, 128, 64, 512),
        (LEAN, 384, 43, 64, 96, 66, 384),
        (WHOLE, 320, 256, 160, 56, 66, 512),
        (TALL, 384, 128, 192, 112, 66, 512),
    ],
)
def test_a_cluster_shares_weights_or_tokens(
    tiles: Tiles, tokens: int, columns: int, x_box: int, weight_box: int, clusters: int, threads: int
) -> None:
    x = tokens_map(1 << 20, tokens, 4096, tiles).matrix
    assert x is not None
    assert (x.box, tiles.share) == ((x_box, 64), weight_box)
    assert tiles.geometry(tokens, columns, 132) == Geometry((2 * clusters, 1, 1), (threads, 1, 1), tiles.shared)
    assert tiles.shared + STATIC <= H100.shared


def test_sums_are_handed_over_through_scratch_and_flags_that_begin_at_zero() -> None:
    tokens, rows, width = 400, 200, 1024
    need = OpNeed(
        "linear_add",
        {
            "x": OperandSpec((tokens, width), DType.BF16, live="T"),
            "weight": OperandSpec((rows, width), DType.BF16, plain(DType.BF16)),
            "residual": OperandSpec((tokens, rows), DType.F32, live="T"),
            "y": OperandSpec((tokens, rows), DType.F32, live="T"),
        },
        {}, "sm_90a", "fast", tokens, 1, 1, tokens, None,
    )  # fmt: skip
    product = CopiedByEngine(TALL_PARTS, residual=True)
    assert product.supports(need).ok
    # Three times 192 tokens and two tiles of 128 rows: a number and, for each 16 tokens of a tile, two flags.
    assert product.scratch_bytes(need) == 4 * 576 * 256
    kept: list[bytes] = []
    operands = {name: Buffer(1 << 20, 1 << 30) for name in need.operands}
    scratch = Buffer(1 << 13, product.scratch_bytes(need))
    context = BindContext(
        CheckingBackend(STATIC), operands, 1 << 12, scratch, 132, lambda data: kept.append(data) or 1 << 14
    )
    (launch,) = product.bind(need, context)
    assert kept == [bytes(4 * 2 * 36 * 2)]
    assert launch.geometry.grid == (2 * 3 * 2, 1, 1)  # a cluster has both tiles of rows, of one part
    short = replace(need, operands={**need.operands, "weight": OperandSpec((rows, 64), DType.BF16, plain(DType.BF16))})
    assert not product.supports(short).ok
