"""What implementations launch fits what KERNEL.toml declares and what an H100 can do; choices are never left to chance."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from atlas_core.conformance.codecs import plain_codec
from atlas_core.conformance.decoder import DecoderShape, DenseDecoder, record_decoder
from atlas_core.conformance.variant import variants, with_caches
from atlas_core.contracts.backend import DeviceFacts
from atlas_core.contracts.declarations import KernelRoot
from atlas_core.contracts.ops import BindContext, Buffer, OpImplementation, OpNeed
from atlas_core.kernels.scan import scan
from atlas_core.model.builder import record
from atlas_core.model.matching import Pattern
from atlas_core.model.planner import Bucket, Choices, Context, PlannedSegment, plan
from atlas_core.ops.cases import GENERATORS, trials
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.runtime.null import NullBackend, NullLaunch
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, Param
from atlas_core.vocab.layout import plain
from atlas_nvidia.fused import fused_ops
from atlas_nvidia.implementations import implementations
from atlas_nvidia.implementations.base import ELEMENTS
from atlas_nvidia.implementations.linear import shared_out
from atlas_nvidia.implementations.wide_linear import PAIR, PairLinear
from atlas_nvidia.launch import Limits, check_arguments, check_geometry

ARCH = "sm_90a"
LAYERS = 2
H100 = Limits(1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535), 227 * 1024, 8)
CODECS = (plain_codec(DType.BF16), plain_codec(DType.F16), plain_codec(DType.F32))


def declared() -> dict[tuple[str, str], tuple[Param, ...]]:
    """Parameters of every kernel that hopper sees, from the KERNEL.toml files."""
    tree, _ = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_hopper")])
    return {(unit.module, entry.name): entry.params for unit in tree.units("hopper") for entry in unit.entries}


class CheckingBackend(NullBackend):
    """Checks every launch as the real backend does, against declarations instead of binaries."""

    def __init__(self) -> None:
        super().__init__()
        self.declared = declared()
        self.used: set[tuple[str, str]] = set()

    def facts(self) -> DeviceFacts:
        """An H100's processors."""
        return replace(super().facts(), processors=132)

    def prepare_launch(
        self, kernel: tuple[str, str], geometry: Geometry, args: list[Arg], attrs: LaunchAttrs | None = None
    ) -> NullLaunch:
        """See GpuBackend."""
        check_arguments(str(kernel), self.declared[kernel], args)
        check_geometry(str(kernel), geometry, attrs or LaunchAttrs(), H100, 1024, 1024)
        self.used.add(kernel)
        return NullLaunch(*kernel, geometry, tuple(args), attrs or LaunchAttrs())


def needs() -> Iterator[tuple[OpImplementation, OpNeed]]:
    """Every implementation of a primitive with every need of the conformance trials, in bf16 and float16."""
    for op in GENERATORS:
        mine = [i for i in implementations() if i.op == op]
        for trial in trials(op, 0):
            for variant in variants(PRIMITIVES[op], trial, ELEMENTS, CODECS):
                for implementation in mine:
                    for chosen in with_caches(variant, implementation, ARCH, "fast"):
                        yield implementation, chosen.need(ARCH, "fast")


def bind(backend: CheckingBackend, implementation: OpImplementation, need: OpNeed) -> int:
    """The number of launches, with made-up addresses."""
    operands = {name: Buffer(1 << 20, 1 << 30) for name in need.operands}
    return len(implementation.bind(need, BindContext(backend, operands, 1 << 12, Buffer(1 << 13, 1 << 20), 132)))


def test_every_supported_need_is_launched_within_declarations_and_limits() -> None:
    backend = CheckingBackend()
    supported: set[str] = set()
    for implementation, need in needs():
        if not implementation.supports(need).ok:
            continue
        supported.add(implementation.name)
        several = {"streamed": 2, "sorted": 4, "chunks": 2, "pair": 2}  # launches
        expected = next((n for kind, n in several.items() if kind in implementation.name), 1)
        # Decode attention is one launch of whichever of its kernels suits the number of blocks.
        choosing = {"paged_decode": 1, "linear_f32_pair": 2}
        kernels = next(
            (n for kind, n in choosing.items() if implementation.name.startswith(kind)), len(implementation.kernels)
        )
        assert bind(backend, implementation, need) == expected == kernels
    # FP8 and NVFP4 have tests of their own.
    primitive = {i.name for i in implementations() if i.op in PRIMITIVES and not re.search("_(scaled|coded)", i.name)}
    assert supported == primitive


def test_no_two_implementations_accept_a_need_with_one_rank() -> None:
    ranks: dict[str, dict[int, str]] = {}
    for implementation, need in needs():
        verdict = implementation.supports(need)
        if verdict.ok:
            key = str((need.op, need.operands, sorted(need.attrs.items()), need.tokens, need.max_query, need.kv))
            other = ranks.setdefault(key, {}).setdefault(verdict.rank, implementation.name)
            assert other == implementation.name, f"{other} and {implementation.name} tie for {need}"


def test_float32_weights_are_two_of_bfloat16() -> None:
    """Which sum up to 16 bits of mantissa at least."""
    values = np.random.default_rng(5).normal(size=(8, 64)).astype(np.float32)
    first, rest = PairLinear().pack(PAIR, plain(DType.F32), (8, 64), values.tobytes())
    error = np.abs(first.astype(np.float32) + rest.astype(np.float32) - values.reshape(-1))
    assert (error <= np.abs(values.reshape(-1)) * 2.0**-17).all()
    with pytest.raises(KernelError, match="cannot be packed"):
        PairLinear().pack(PAIR, plain(DType.BF16), (8, 64), values.tobytes())


def test_exact_numerics_are_refused_by_every_product() -> None:
    for implementation, need in needs():
        if implementation.op == "linear":
            verdict = implementation.supports(replace(need, numerics="exact"))
            assert not verdict.ok
            assert any(r.endswith("which is not exact") for r in verdict.reasons)


def planned(tokens: int, element: DType) -> list[PlannedSegment]:
    """The plan of a small decoder for one decode bucket."""
    shape = DecoderShape("test", 512, 4, 1, 128, 768, 512, 16, layers=LAYERS)
    recorded = record_decoder(shape)
    program = record(DenseDecoder(shape), recorded.spec, replace(recorded.layout, activation=element))
    weights = {value.name: plain(element) for value in program.weights()}
    patterns = [Pattern.of(op, PRIMITIVES) for op in fused_ops()]
    context = Context(ARCH, "fast", element, weights, implementations(), patterns)
    return plan(program, Bucket(tokens, tokens, tokens, 8, 1), context, Choices())


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("tokens", "fused"), [(1, True), (8, True), (9, False), (64, False)])
def test_a_dense_layer_is_five_launches_for_up_to_eight_tokens(tokens: int, fused: bool, element: DType) -> None:
    segments = planned(tokens, element)
    backend = CheckingBackend()
    steps = [step for segment in segments for step in segment.steps]
    assert [bind(backend, step.implementation, step.need) for step in steps] == [
        2 if step.need.op == "process_sample" else 1 for step in steps
    ]
    ops = [step.need.op for step in segments[0].steps]
    layer = ["norm_qkv_rope_append", "paged_attention", "linear_add", "norm_gate_up_silu", "linear_add"]
    if fused:
        assert ops == ["step_begin", "embed", *layer * LAYERS, "gather_rows", "rms_norm", "linear"]
    else:
        assert "norm_gate_up_silu" not in ops
        assert ops.count("linear_add") == 2 * LAYERS


@pytest.mark.parametrize("element", ELEMENTS)
def test_pages_and_kernels_are_of_the_activation_type_and_the_residual_stream_is_float32(element: DType) -> None:
    for segment in planned(8, element):
        for step in segment.steps:
            if step.need.kv:
                assert step.need.kv == f"hnd_{element.value}"
            if "residual" in step.need.operands:
                assert step.need.operands["residual"].dtype is step.need.operands["y"].dtype is DType.F32
                refused = step.implementation.supports(
                    replace(step.need, operands={**step.need.operands, "residual": step.need.operands["x"]})
                )
                assert not refused.ok
            modules = {module for module, _ in step.implementation.kernels}
            assert (element is DType.F16) == any(module.endswith("_f16") for module in modules) or (
                step.need.op in {"step_begin", "gather_rows", "process_sample", "logprobs", "advance"}
            )


@pytest.mark.parametrize(
    ("tiles", "steps", "splits"),
    [
        (32, 64, 4),
        (8, 64, 8),
        (112, 64, 2),
        (1002, 64, 1),
        (32, 4, 1),
        (1, 24, 4),
        (1, 32, 8),
        (66, 64, 2),
        (133, 64, 1),
    ],
)
def test_few_tiles_are_shared_out_until_every_processor_has_a_block(tiles: int, steps: int, splits: int) -> None:
    assert shared_out(tiles, steps, 132) == splits
