"""How layers of linear attention are planned, by the number of tokens and the sizes of heads."""

import pytest

from atlas_core.conformance.linear_decoder import LARGE_LINEAR_SHAPES, LinearShape, record_linear_decoder
from atlas_core.model.matching import Pattern
from atlas_core.model.planner import Bucket, Choices, Context, PlannedSegment, plan
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import plain
from atlas_nvidia.fused import fused_ops
from atlas_nvidia.implementations import implementations

REAL = LARGE_LINEAR_SHAPES[0]
PROJECTIONS = ["rms_norm", "linear", "linear", "linear", "linear"]


def planned(shape: LinearShape, bucket: Bucket) -> PlannedSegment:
    """The forward segment."""
    program = record_linear_decoder(shape).program
    weights = {value.name: plain(DType.BF16) for value in program.weights()}
    patterns = [Pattern.of(op, PRIMITIVES) for op in fused_ops()]
    context = Context("sm_90a", "fast", DType.BF16, weights, implementations(), patterns)
    return plan(program, bucket, context, Choices())[0]


def layer(segment: PlannedSegment) -> list[str]:
    """Ops between the embedding and what follows the only layer."""
    ops = [step.need.op for step in segment.steps]
    return ops[2 : ops.index("gather_rows")]


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_decode_step_of_a_layer_is_three_nodes(tokens: int) -> None:
    segment = planned(REAL, Bucket(tokens, tokens, tokens, 8, 1))
    assert layer(segment) == ["norm_linears", "linear_attention_step", "linear_add"]


def test_many_sequences_have_products_of_their_own() -> None:
    assert layer(planned(REAL, Bucket(64, 64, 64, 8, 1))) == [*PROJECTIONS, "linear_attention_step", "linear_add"]


def test_prompts_are_read_in_chunks() -> None:
    segment = planned(REAL, Bucket(2048, 4, 4, 8, 2048))
    assert layer(segment) == [*PROJECTIONS, "conv_l2_norm", "gated_delta_rule", "gated_rms_norm", "linear_add"]
    names = {step.need.op: step.implementation.name for step in segment.steps}
    assert names["gated_delta_rule"] == "gated_delta_rule_chunks"


def test_small_heads_have_kernels_of_any_size() -> None:
    shape = LinearShape("small", 64, 2, 4, 16, 16, layers=1)
    for bucket in (Bucket(4, 4, 4, 8, 1), Bucket(200, 4, 4, 8, 200)):
        segment = planned(shape, bucket)
        assert layer(segment)[5:] == ["conv_l2_norm", "gated_delta_rule", "gated_rms_norm", "linear_add"]
        names = {step.need.op: step.implementation.name for step in segment.steps}
        assert names["gated_delta_rule"] == "gated_delta_rule"


@pytest.mark.parametrize(
    ("values", "planned_as"), [(16, "linear_attention_step"), (48, "linear_attention_step"), (144, "conv_l2_norm")]
)
def test_the_value_heads_of_a_key_head_share_a_cluster_of_eight_at_most(values: int, planned_as: str) -> None:
    shape = LinearShape("heads", 256, 16, values, 128, 128, layers=1)
    assert planned_as in layer(planned(shape, Bucket(1, 1, 1, 8, 1)))


def test_scratch_holds_the_chunks_of_every_division_of_the_tokens() -> None:
    bucket = Bucket(2048, 4, 4, 8, 2048)
    step = next(step for step in planned(REAL, bucket).steps if step.need.op == "gated_delta_rule")
    most = 2048 // 64 + 2 * 4
    assert step.implementation.scratch_bytes(step.need) == most * 32 * (2 * 64 * 64 * 2 + 2 * 64 * 4)
    # Rows that begin and end within chunks: (position, tokens).
    for rows in ([(63, 2), (1, 2042), (0, 1), (64, 3)], [(63, 512)] * 4, [(62, 3), (63, 65), (63, 66), (1, 1914)]):
        assert sum(tokens for _, tokens in rows) <= 2048
        assert sum((at + tokens - 1) // 64 - at // 64 + 1 for at, tokens in rows) <= most
