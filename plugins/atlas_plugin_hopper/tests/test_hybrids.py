"""All between two full attentions of a hybrid as one launch: what is taken, and what the launch is told."""

import struct

import pytest
from checking import CheckingBackend
from msgspec.structs import replace

from atlas_core.conformance.hybrid_decoder import HYBRID_SHAPES, HybridDecoder, HybridShape, record_hybrid_decoder
from atlas_core.contracts.ops import BindContext, Buffer
from atlas_core.model.builder import record
from atlas_core.model.matching import Pattern
from atlas_core.model.planner import Bucket, Choices, Context, Step, plan
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.runtime.null import NullLaunch
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import LaunchAttrs
from atlas_core.vocab.layout import plain
from atlas_nvidia.fused import fused_ops
from atlas_nvidia.implementations import implementations as of_nvidia
from atlas_plugin_hopper.fused import fused_ops as of_hopper
from atlas_plugin_hopper.implementations import implementations

HYBRID = HYBRID_SHAPES[0]
CHAINS = ["hybrid_layers", "mixture_layers", "output_mixture"]


def hybrid_steps(tokens: int, shape: HybridShape = HYBRID, element: DType = DType.BF16) -> list[Step]:
    """The plan of a hybrid for one decode bucket."""
    recorded = record_hybrid_decoder(shape)
    program = record(HybridDecoder(shape), recorded.spec, replace(recorded.layout, activation=element))
    weights = {value.name: plain(element) for value in program.weights()}
    patterns = [Pattern.of(op, PRIMITIVES) for op in (*fused_ops(), *of_hopper())]
    context = Context("sm_90a", "fast", element, weights, [*of_nvidia(), *implementations()], patterns)
    planned = plan(program, Bucket(tokens, tokens, tokens, 8, 1), context, Choices())
    return [step for segment in planned for step in segment.steps]


def launched(step: Step, operands: dict[str, Buffer], workers: int = 132) -> tuple[NullLaunch, list[bytes]]:
    """The one launch of a step, and what is kept for it."""
    kept: list[bytes] = []
    context = BindContext(
        CheckingBackend(0),
        operands,
        1 << 12,
        Buffer(1 << 13, 0),
        workers,
        lambda data: kept.append(data) or 1 << 8 * len(kept),
    )
    (launch,) = step.implementation.bind(step.need, context)
    assert (launch.module, launch.entry) in step.implementation.kernels
    return launch, kept


def test_all_between_two_attentions_is_one_launch_for_one_token() -> None:
    found = hybrid_steps(1)
    others = ("paged_attention", "norm_linears", "linear_add")
    ops = [step.need.op for step in found if step.need.op in (*CHAINS, *others)]
    assert ops == ["hybrid_layers", "paged_attention", "mixture_layers", "paged_attention", "output_mixture"]
    assert not set(CHAINS) & {step.need.op for step in hybrid_steps(2)}


@pytest.mark.parametrize("op", CHAINS)
def test_a_chain_of_hybrid_layers_is_told_where_every_layer_finds_its_own(op: str) -> None:
    (step,) = (step for step in hybrid_steps(1) if step.need.op == op)
    operands = {name: Buffer(0x10000 * (1 + n), 0x3000) for n, name in enumerate(step.need.operands)}
    launch, (table, words) = launched(step, operands)
    assert launch.geometry.grid == (132, 1, 1)
    assert launch.attrs == LaunchAttrs(overlap=True)
    assert len(words) == 8 * (16 + 12352 + 4 * (1024 + 1024 + 256 + 2048 + 128 + 2304))
    assert not any(words)
    at = {name: buffer.address for name, buffer in operands.items()}
    before = [
        "norm_weight",
        "qkv_weight",
        "gate_weight",
        "b_weight",
        "a_weight",
        "filters",
        "a_log",
        "dt_bias",
        "head_norm",
    ]
    behind = [
        "output_weight", "inner_norm", "router_weight", "expert_gate", "expert_up", "expert_down", "shared_gate_weight",
        "shared_up_weight", "shared_down_weight", "shared_weight",
    ]  # fmt: skip
    links = {"hybrid_layers": 2, "mixture_layers": 1, "output_mixture": 0}[op]
    want: list[int] = []
    if op != "hybrid_layers":
        name = "first_{}" if links else "{}.0"
        want += [0] * 11 + [at[name.format(part)] for part in behind]
    first = {"hybrid_layers": 0, "mixture_layers": 2, "output_mixture": 0}[op]
    for link in range(links):
        states = [at[name] + (first + link) * 0x1000 for name in ("conv_state", "state")]
        want += [*(at[f"{part}.{link}"] for part in before), *states, *(at[f"{part}.{link}"] for part in behind)]
    if links:
        want += [at["last_norm"], *(at[f"weight_{i}"] for i in range(4)), *[0] * 16]
    assert list(struct.unpack(f"<{len(want)}Q", table)) == want
    values = [arg.value for arg in launch.args]
    given = {"hybrid_layers": (0, 0), "mixture_layers": (at.get("first_values"), at.get("first_opened"))}
    assert (values[3], values[4]) == given.get(op, (at.get("values"), at.get("opened")))
    assert values[10:12] == [links + (op != "hybrid_layers"), 9]
    ends = [4096, 8192, 8704, 9216] if links else [0, 0, 0, 0]
    assert values[-4:] == ends
    assert values[-8:-4] == ([at[f"y_{i}"] for i in range(4)] if links else [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"linear": replace(HYBRID.linear, value_heads=16)}, "qkv_weight is (6144, 2048), not (8192, 2048)"),
        ({"mixture": replace(HYBRID.mixture, active=4)}, "it chooses 8 experts, not 4"),
        ({"mixture": replace(HYBRID.mixture, size=256)}, "expert_gate is (9, 256, 2048), not (9, 512, 2048)"),
        ({"mixture": replace(HYBRID.mixture, count=300)}, "router_weight is (300, 2048), not (256, 2048)"),
    ],
)
def test_other_hybrids_are_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    found = hybrid_steps(1, replace(HYBRID, **change))
    assert "hybrid_layers" not in {step.need.op for step in found}
    told = [each for step in found for c in step.rejected if c.name == "hybrid_layers" for each in c.verdict.reasons]
    assert reason in told


def test_a_machine_of_fewer_processors_is_refused_with_the_reason() -> None:
    (step,) = (step for step in hybrid_steps(1) if step.need.op == "hybrid_layers")
    few = step.implementation.supports(replace(step.need, processors=114))
    assert few.reasons == ("it wants 130 processors, and this machine has 114",)
    assert step.implementation.supports(replace(step.need, processors=130)).ok
    operands = {name: Buffer(1 << 20, 1 << 30) for name in step.need.operands}
    with pytest.raises(KernelError, match="wants 130 processors"):
        launched(step, operands, workers=114)
