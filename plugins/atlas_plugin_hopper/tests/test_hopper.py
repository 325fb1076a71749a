"""Hopper's own implementations: which tiles they choose, what they take, and that launches fit declarations and device."""

import struct
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from checking import H100, CheckingBackend
from msgspec.structs import replace

import atlas_plugin_hopper
from atlas_core.conformance.decoder import CHAIN_SHAPES, SHAPES, DecoderShape, DenseDecoder, record_decoder
from atlas_core.conformance.linear_decoder import LARGE_LINEAR_SHAPES, LinearDecoder, record_linear_decoder
from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, Buffer
from atlas_core.model.builder import record
from atlas_core.model.matching import Pattern
from atlas_core.model.planner import Bucket, Choices, Context, Step, plan
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.runtime.null import NullLaunch
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs
from atlas_core.vocab.layout import plain
from atlas_nvidia.fused import fused_ops
from atlas_nvidia.implementations import implementations as of_nvidia
from atlas_nvidia.implementations.base import ELEMENTS
from atlas_nvidia.launch import check_residency
from atlas_plugin_hopper.chains import Sizes
from atlas_plugin_hopper.fused import fused_ops as of_hopper
from atlas_plugin_hopper.implementations import implementations
from atlas_plugin_hopper.moe_chains import BLOCKS
from atlas_plugin_hopper.moe_chains import Sizes as MoeSizes
from atlas_plugin_hopper.prompt_chains import LinearAddGateUp
from atlas_plugin_hopper.prompt_layers import (
    PAIRS,
    UNNORMED,
    NormQkvRopeAppend,
)
from atlas_plugin_hopper.prompts import (
    NARROW,
    TALL_PARTS,
    Tiles,
)
from atlas_plugin_hopper.skinny import GATE_UP_ROWS, LINEAR_ROWS, LINEARS_ROWS, QKV_ROWS
from atlas_plugin_hopper.tiles import Tiling, tiling

STATIC = 1024
SOURCES = Path(atlas_plugin_hopper.__file__).parent / "kernels/hopper/common/KERNEL.toml"
PARAMETERS = {entry["name"]: len(entry["params"]) for entry in tomllib.loads(SOURCES.read_text())["entry"]}
"""Of every kernel, by entry."""
BESIDE = "moe_shared_add_beside"
LAYERS = 2


SMALL = DecoderShape("test", 512, 4, 1, 128, 768, 512, 16, layers=LAYERS)


def steps(tokens: int, element: DType, shape: DecoderShape = SMALL) -> list[Step]:
    """The plan of a small decoder for one decode bucket, as Hopper plans it."""
    recorded = record_decoder(shape)
    program = record(DenseDecoder(shape), recorded.spec, replace(recorded.layout, activation=element))
    weights = {value.name: plain(element) for value in program.weights()}
    patterns = [Pattern.of(op, PRIMITIVES) for op in (*fused_ops(), *of_hopper())]
    context = Context("sm_90a", "fast", element, weights, [*of_nvidia(), *implementations()], patterns)
    bucket = Bucket(tokens, tokens, tokens, 8, 1)
    return [step for segment in plan(program, bucket, context, Choices()) for step in segment.steps]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("tokens", [9, 17, 64, 65])
def test_layers_of_up_to_64_tokens_are_fused_and_every_launch_fits(tokens: int, element: DType) -> None:
    found = steps(tokens, element)
    for step in found:
        assert {(launch.module, launch.entry) for launch in launches(step)} <= set(step.implementation.kernels)
    names = [step.implementation.name.removesuffix(".f16") for step in found]
    fused = tokens <= 64
    chained = fused and element is DType.BF16
    assert names.count("linear_add_gate_up_skinny") == (LAYERS if chained else 0)
    assert names.count("linear_add_qkv_skinny") == (LAYERS - 1 if chained else 0)
    assert names.count("norm_gate_up_skinny") == (LAYERS if fused and not chained else 0)
    assert names.count("norm_qkv_skinny") == (1 if chained else LAYERS if fused else 0)


def launches(step: Step) -> list[NullLaunch]:
    """What a step launches, checked against declarations and device."""
    operands = {name: Buffer(1 << 20, 1 << 30) for name in step.need.operands}
    scratch = Buffer(1 << 13, step.implementation.scratch_bytes(step.need))
    context = BindContext(CheckingBackend(STATIC), operands, 1 << 12, scratch, 132, lambda data: 1 << 14)
    return list(step.implementation.bind(step.need, context))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("tokens", [256, 384, 512, 2048])
@pytest.mark.parametrize(
    "shape", [SMALL, replace(SMALL, head_norm=True), replace(SMALL, head_dim=64, heads=9, kv_heads=3)]
)
def test_a_layer_of_a_prompt_is_five_launches_that_fit_or_seven(
    shape: DecoderShape, tokens: int, element: DType
) -> None:
    """Norms are folded into the projections before them, where bfloat16 has the range for what is not yet normalised."""
    found = steps(tokens, element, shape)
    names = [step.implementation.name.removesuffix(".f16") for step in found]
    before = f"norm_qkv_{'heads_' if shape.head_norm else ''}rope_append_tma_{shape.head_dim}"

    def count(start: str) -> int:
        return sum(name.startswith(start) for name in names)

    folded = element is DType.BF16
    assert count("linear_add_gate_up_tma") == (LAYERS if folded else 0)
    assert count("norm_gate_up_tma") == (0 if folded else LAYERS)
    chained = folded and not shape.head_norm
    assert count(f"linear_add_qkv_{shape.head_dim}_tma") == (LAYERS - 1 if chained else 0)
    assert count(before) == (1 if chained else LAYERS)
    total = 0
    for name, step in zip(names, found, strict=True):
        made = launches(step)
        assert {(launch.module, launch.entry) for launch in made} <= set(step.implementation.kernels)
        assert all(len(launch.args) == PARAMETERS.get(launch.entry, len(launch.args)) for launch in made)
        total += len(made) if name.startswith(("linear_add", "norm_", "paged")) else 0
        for launch in made if "_tma" in name else ():
            if launch.entry == "rms_norm":
                continue
            clusters, shared = launch.geometry.grid[0] // 2, launch.geometry.shared
            assert launch.attrs == LaunchAttrs(overlap=True, cluster=(2, 1, 1))
            assert 1 <= clusters <= 66
            assert shared + STATIC <= H100.shared
    norms = (0 if folded else LAYERS) + (1 if chained else LAYERS)
    assert total == 5 * LAYERS + norms


@pytest.mark.parametrize(("tiles", "parts", "handed"), [(NARROW, 4, 0), (TALL_PARTS, 8, 4 * 384 * 512)])
def test_what_a_norm_multiplies_lies_before_its_sums_of_squares_in_scratch(
    tiles: Tiles, parts: int, handed: int
) -> None:
    (step,) = (s for s in steps(384, DType.BF16, replace(SMALL, layers=1)) if s.need.op.endswith("gate_up_silu"))
    chosen = LinearAddGateUp(tiles)
    assert chosen.supports(step.need).ok
    scaled = 1 << 13
    squares = scaled + 2 * 384 * 512
    assert chosen.scratch_bytes(step.need) == 2 * 384 * 512 + 4 * 384 * parts + handed
    first, second = launches(replace(step, implementation=chosen))
    # Of the first: where sums are handed over, their flags, the norm's weights, and what is left for the second.
    places = [squares + 4 * 384 * parts, 1 << 14] if handed else [0, 0]
    assert [arg.value for arg in first.args[6:11]] == [*places, 1 << 20, scaled, squares]
    assert [second.args[at].value for at in (1, 4, 8)] == [scaled, squares, parts]


@pytest.mark.parametrize("tokens", [65, 128])
def test_one_tile_of_tokens_keeps_its_norms_apart(tokens: int) -> None:
    found = steps(tokens, DType.BF16, SMALL)
    assert not any(step.need.op.startswith("linear_add_norm") for step in found)
    told = [each for step in found for c in step.rejected if "gate_up_tma" in c.name for each in c.verdict.reasons]
    assert any(f"{tokens} tokens leave one of two blocks idle" in each for each in told)


@pytest.mark.parametrize("tokens", [300, 2048])
@pytest.mark.parametrize("tiles", UNNORMED[128], ids=UNNORMED[128].values())
def test_each_kind_of_tiles_has_its_kernel_boxes_and_room(tiles: Tiles, tokens: int) -> None:
    step = next(s for s in steps(tokens, DType.BF16, SMALL) if s.need.op == "norm_qkv_rope_append")
    _, launch = launches(replace(step, implementation=NormQkvRopeAppend(128, tiles, DType.BF16)))
    assert launch.module == UNNORMED[128][tiles]
    assert len(launch.args) == PARAMETERS[launch.entry]
    assert launch.module.startswith(launch.entry)
    heads = step.need.attrs["q_heads"], step.need.attrs["kv_heads"], step.need.attrs["kv_heads"]
    each = tiles.rows // 128
    columns = -(-sum(heads) * 128 // tiles.rows) if tiles is PAIRS else sum(-(-n // each) for n in heads)
    assert launch.geometry.grid[0] == 2 * min(66, -(-tokens // (2 * tiles.tokens)) * columns)
    assert launch.geometry.shared + 3 * 1024 <= H100.shared
    assert launch.geometry.shared == tiles.shared


@pytest.mark.parametrize(
    ("rows", "options", "unit", "chosen"),
    [
        ((4096,), LINEAR_ROWS, 1, Tiling(64, 64, 2)),
        ((128256,), LINEAR_ROWS, 1, Tiling(128, 1002, 1)),
        ((14336,), GATE_UP_ROWS, 2, Tiling(224, 128, 1)),
        ((12288,), GATE_UP_ROWS, 2, Tiling(192, 128, 1)),
        ((6144,), QKV_ROWS, 1, Tiling(96, 64, 2)),
        ((960,), QKV_ROWS, 1, Tiling(64, 15, 2)),
        ((8192, 4096, 32, 32), LINEARS_ROWS, 1, Tiling(96, 131, 1)),
        ((10240, 6144, 48, 48), LINEARS_ROWS, 1, Tiling(128, 130, 1)),
    ],
)
def test_tiles_share_weight_rows_out_evenly(
    rows: tuple[int, ...], options: tuple[int, ...], unit: int, chosen: Tiling
) -> None:
    assert tiling(rows, options, 132, unit) == chosen


def test_a_ring_has_as_many_stages_as_fit_and_no_more_than_steps() -> None:
    tiles = Tiling(224, 128, 1)
    assert tiles.stage == (64 + 224) * 128
    assert tiles.stages(227 * 1024 - STATIC, 4096) == 6
    assert Tiling(64, 64, 2).stages(227 * 1024, 256) == 2


def hybrid(sequences: int, element: DType) -> list[Step]:
    """The steps of the only layer, one token a sequence."""
    recorded = record_linear_decoder(LARGE_LINEAR_SHAPES[0])
    program = record(LinearDecoder(LARGE_LINEAR_SHAPES[0]), recorded.spec, replace(recorded.layout, activation=element))
    weights = {value.name: plain(element) for value in program.weights()}
    patterns = [Pattern.of(op, PRIMITIVES) for op in (*fused_ops(), *of_hopper())]
    context = Context("sm_90a", "fast", element, weights, [*of_nvidia(), *implementations()], patterns)
    found = plan(program, Bucket(sequences, sequences, sequences, 8, 1), context, Choices())[0].steps
    ops = [step.need.op for step in found]
    return list(found[2 : ops.index("gather_rows")])


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(
    ("sequences", "projections"), [(1, "norm_linears"), (9, "norm_linears_skinny"), (64, "norm_linears_skinny")]
)
def test_a_decode_step_of_up_to_64_sequences_is_three_nodes(sequences: int, projections: str, element: DType) -> None:
    found = hybrid(sequences, element)
    names = [step.implementation.name.removesuffix(f".{element.value}") for step in found]
    assert names[:2] == [projections, "linear_attention_step"]
    assert len(names) == 3
    for step in found:
        assert {(launch.module, launch.entry) for launch in launches(step)} <= set(step.implementation.kernels)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("tokens", "planned"), [(8, "moe_shared_add_streamed_8"), (9, BESIDE), (64, BESIDE)])
def test_an_expert_for_all_tokens_is_multiplied_beside_the_others(tokens: int, planned: str, element: DType) -> None:
    shape = next(shape for shape in SHAPES if shape.mixture and shape.mixture.shared)
    (step,) = (s for s in steps(tokens, element, shape) if s.need.op == "moe_shared_add")
    assert step.implementation.name.removesuffix(f".{element.value}") == planned
    assert {(launch.module, launch.entry) for launch in launches(step)} <= set(step.implementation.kernels)
    if planned == BESIDE:
        assert len(launches(step)) == 7
        assert step.implementation.scratch_bytes(step.need) >= 2 * tokens * (3 * 64 + 64 + 1 + 128)


SMOLLM2 = replace(next(shape for shape in SHAPES if shape.label == "nine"), layers=3)


@pytest.mark.parametrize("element", ELEMENTS)
def test_all_layers_are_one_launch_that_is_told_where_every_link_finds_its_own(element: DType) -> None:
    found = steps(1, element, SMOLLM2)
    (chain,) = (step for step in found if step.need.op == "decoder_layers")
    assert len(chain.replaces) == 16 * SMOLLM2.layers
    assert not any(step.need.op in ("linear_add", "paged_attention", "norm_gate_up_silu") for step in found)
    operands = {name: Buffer(0x10000 * (1 + n), 0x600) for n, name in enumerate(chain.need.operands)}
    kept: list[bytes] = []
    context = BindContext(
        CheckingBackend(STATIC),
        operands,
        1 << 12,
        Buffer(1 << 13, 0),
        132,
        lambda data: kept.append(data) or 256 * len(kept),
    )
    (launch,) = chain.implementation.bind(chain.need, context)
    assert (launch.module, launch.entry) in chain.implementation.kernels
    assert launch.module.startswith("decoder_clusters")
    assert launch.geometry.grid == (7 * 16, 1, 1)
    assert launch.attrs == LaunchAttrs(overlap=True, cluster=(16, 1, 1), cooperative=True)
    table, words = kept
    assert not any(words)
    order = (
        "norm_weight",
        "q_weight",
        "k_weight",
        "v_weight",
        "output_weight",
        "inner_norm",
        "gate_weight",
        "up_weight",
        "down_weight",
    )
    want = [
        address
        for link in range(3)
        for address in (*(operands[f"{name}.{link}"].address for name in order), operands["cache"].address + link * 0x200)
    ]  # fmt: skip
    assert list(struct.unpack(f"<{len(want)}Q", table)) == want
    names = {value.name for value in chain.node.operands.values()}
    assert {f"layers.{layer}.down" for layer in range(3)} <= names


@pytest.mark.parametrize(
    ("shape", "tokens", "reason"),
    [(SMOLLM2, 2, "it takes one token, not 2"), (replace(SMOLLM2, inner=1024), 1, "inner=1024")],
)
def test_others_are_refused_with_the_reason(shape: DecoderShape, tokens: int, reason: str) -> None:
    found = steps(tokens, DType.BF16, shape)
    assert not any(step.need.op == "decoder_layers" for step in found)
    told = [each for step in found for c in step.rejected if c.name == "decoder_layers" for each in c.verdict.reasons]
    assert any(reason in each for each in told)


def test_the_type_of_what_lies_within_is_that_of_the_activations() -> None:
    (chain,) = (step for step in steps(1, DType.BF16, SMOLLM2) if step.need.op == "decoder_layers")
    verdict = chain.implementation.supports(replace(chain.need, activation=DType.F16))
    assert verdict.reasons == ("it computes in bf16, not in f16",)


class Crowded(CheckingBackend):
    """A device that has no room for clusters that wait for each other."""

    def prepare_launch(
        self, kernel: tuple[str, str], geometry: Geometry, args: list[Arg], attrs: LaunchAttrs | None = None
    ) -> NullLaunch:
        """See GpuBackend."""
        if attrs and attrs.cluster and attrs.cooperative:
            check_residency(str(kernel), geometry, attrs.cluster, 6)
        return super().prepare_launch(kernel, geometry, args, attrs)


def test_where_seven_clusters_have_no_room_all_layers_are_one_launch_of_single_blocks() -> None:
    (chain,) = (step for step in steps(1, DType.BF16, SMOLLM2) if step.need.op == "decoder_layers")
    operands = {name: Buffer(0x10000 * (1 + n), 0x600) for n, name in enumerate(chain.need.operands)}
    context = BindContext(Crowded(STATIC), operands, 1 << 12, Buffer(1 << 13, 0), 132, lambda data: 256)
    (launch,) = chain.implementation.bind(chain.need, context)
    assert (launch.module, launch.geometry.grid) == ("decoder_layers", (132, 1, 1))
    assert launch.attrs == LaunchAttrs(cooperative=True)
    assert (launch.module, launch.entry) in chain.implementation.kernels


def test_words_of_all_blocks_have_room() -> None:
    sizes = Sizes(576, 1536, 9, 3, 64)
    each = 576 + 768 + 32 * 9 * 2 + 32 * 9 * 32
    assert sizes.words == 16 + 960 + 4 * each
    assert sizes.cluster_words(7) == 16 + 2 * 4 * 7 * 288


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("tokens", "fused"), [(1, True), (8, True), (9, False)])
def test_logits_of_a_narrow_model_are_one_launch_for_up_to_eight_rows(tokens: int, fused: bool, element: DType) -> None:
    found = [step for step in steps(tokens, element, SMOLLM2) if step.need.op == "gather_norm_linear"]
    assert bool(found) == fused
    if fused:
        assert found[0].implementation.name.removesuffix(f".{element.value}") == "narrow_head"
        (launch,) = launches(found[0])
        assert (launch.module, launch.entry) in found[0].implementation.kernels
        # 512 rows are 32 tiles for 6 warps a block, of two tiles each.
        assert launch.geometry == Geometry((6, 1, 1), (192, 1, 1), 6 * 2 * 16 * 1152 + tokens * (1152 + 64))


def test_a_wide_head_stays_what_it_was() -> None:
    found = steps(1, DType.BF16, replace(SMOLLM2, hidden=1152, heads=18, kv_heads=6))
    assert [step.need.op for step in found if step.need.op.startswith("gather")] == ["gather_rows"]


THIRTY = CHAIN_SHAPES[0]


@pytest.mark.parametrize("element", ELEMENTS)
def test_layers_with_experts_are_one_launch_as_well(element: DType) -> None:
    (chain,) = (step for step in steps(1, element, THIRTY) if step.need.op == "moe_decoder_layers")
    assert len(chain.replaces) == 17 * THIRTY.layers
    operands = {name: Buffer(0x10000 * (1 + n), 0x600) for n, name in enumerate(chain.need.operands)}
    kept: list[bytes] = []

    def bound(workers: int) -> Sequence[Launch]:
        context = BindContext(
            CheckingBackend(STATIC), operands, 1 << 12, Buffer(1 << 13, 0), workers,
            lambda data: kept.append(data) or 256 * len(kept),
        )  # fmt: skip
        return chain.implementation.bind(chain.need, context)

    (launch,) = bound(132)
    assert (launch.module, launch.entry) in chain.implementation.kernels
    assert launch.geometry.grid == (BLOCKS, 1, 1)
    table, words = kept
    assert len(words) == 8 * MoeSizes(2048, 768, 128, 8, 32, 4, 128).words == 8 * 104016
    order = (
        "norm_weight", "q_weight", "k_weight", "v_weight", "q_norm", "k_norm", "output_weight", "inner_norm",
        "router_weight", "gate", "up", "down",
    )  # fmt: skip
    want = [
        address
        for link in range(THIRTY.layers)
        for address in (*(operands[f"{name}.{link}"].address for name in order), operands["cache"].address + link * 0x300)
    ]  # fmt: skip
    assert list(struct.unpack(f"<{len(want)}Q", table)) == want
    with pytest.raises(KernelError, match="114 processors"):
        bound(114)


@pytest.mark.parametrize(
    ("shape", "tokens", "reason"),
    [
        (THIRTY, 2, "it takes one token, not 2"),
        (replace(THIRTY, heads=16), 1, "q_heads=16"),
        (replace(THIRTY, head_dim=64), 1, "head_dim=64"),
    ],
)
def test_other_layers_with_experts_are_refused_with_the_reason(shape: DecoderShape, tokens: int, reason: str) -> None:
    found = steps(tokens, DType.BF16, shape)
    assert not any(step.need.op == "moe_decoder_layers" for step in found)
    told = [
        each for step in found for c in step.rejected if c.name == "moe_decoder_layers" for each in c.verdict.reasons
    ]
    assert any(reason in each for each in told)
