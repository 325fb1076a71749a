"""The planner: the longest fused op, the best rank, one packing and one page layout for all."""

import pytest
from random_programs import Opinion

from atlas_core.conformance.decoder import SHAPES, record_decoder
from atlas_core.contracts.ops import FusedCall, FusedOp, KVLayout
from atlas_core.model.matching import Pattern
from atlas_core.model.planner import Bucket, Choices, Context, plan
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import ResolveError
from atlas_core.vocab.layout import plain
from atlas_core.vocab.verdict import Verdict

MODEL = record_decoder(SHAPES[0])
DECODE = Bucket(4, 4, 4, 8, 1)
ADD_NORM = FusedOp(
    "add_norm",
    (
        FusedCall("add", {"x": "x", "z": "z", "y": "h"}),
        FusedCall("rms_norm", {"x": "h", "weight": "w", "y": "y"}, {"eps": "eps"}),
    ),
    ("h", "y"),
)


def planned(implementations, patterns=(), choices=None, bucket=DECODE):
    layouts = {value.name: plain(DType.BF16) for value in MODEL.program.weights()}
    context = Context("any", "exact", DType.BF16, layouts, implementations, patterns)
    segments = plan(MODEL.program, bucket, context, choices if choices is not None else Choices())
    return [step for segment in segments for step in segment.steps]


def everything(**replaced):
    return [replaced.get(op, Opinion(op, f"plain_{op}")) for op in PRIMITIVES]


def test_without_fused_ops_every_node_is_a_step_and_segments_stay_apart():
    steps = planned(everything())
    assert [step.node for step in steps] == list(MODEL.program.nodes)
    assert all(step.replaces == (step.node.op.name,) for step in steps)


def test_a_fused_op_replaces_its_body_where_it_matches_and_nowhere_else():
    steps = planned([*everything(), Opinion("add_norm", "fused")], [Pattern.of(ADD_NORM, PRIMITIVES)])
    # Two layers: after attention, and between the layers. The last residual goes through gather_rows first.
    assert sum(step.node.op.name == "add_norm" for step in steps) == 3
    assert sum(len(step.replaces) for step in steps) == len(MODEL.program.nodes)
    first = next(step for step in steps if step.node.op.name == "add_norm")
    assert first.parts == {"x": "add", "z": "add", "h": "add", "w": "rms_norm", "y": "rms_norm"}


def test_a_refused_fused_op_falls_back_and_says_why():
    refusing = Opinion("add_norm", "fused", Verdict.no("only on Tuesdays"))
    steps = planned([*everything(), refusing], [Pattern.of(ADD_NORM, PRIMITIVES)])
    assert not any(step.node.op.name == "add_norm" for step in steps)
    told = [c.verdict.reasons for step in steps for c in step.rejected if c.name == "fused"]
    assert told == [("only on Tuesdays",)] * 3


def test_the_higher_rank_wins_and_equal_ranks_are_an_error():
    both = [*everything(), Opinion("linear", "better", Verdict.yes(5))]
    assert {s.implementation.name for s in planned(both) if s.node.op.name == "linear"} == {"better"}
    with pytest.raises(ResolveError, match="rank 0"):
        planned([*everything(), Opinion("linear", "twin")])


def test_a_node_that_nobody_runs_is_an_error_naming_op_shapes_and_reasons():
    with pytest.raises(ResolveError) as caught:
        planned(everything(rope=Opinion("rope", "only_even", Verdict.no("heads are odd"))))
    assert "no kernel runs rope" in caught.value.what
    assert "x [4, 64]" in caught.value.what
    assert "heads are odd" in caught.value.why


def test_later_buckets_must_read_what_the_first_packed():
    choices = Choices()
    planned(everything(linear=Opinion("linear", "gemv", packed={"weight": "tiles"})), choices=choices)
    with pytest.raises(ResolveError) as caught:
        planned(everything(linear=Opinion("linear", "gemm", packed={"weight": "rows"})), choices=choices)
    assert "packed as rows, and it is packed as tiles" in caught.value.why


def test_append_and_attention_agree_about_pages():
    tall, wide = KVLayout("tall", DType.F16, 16), KVLayout("wide", DType.F32, 16)
    choices = Choices()
    steps = planned(
        everything(
            kv_append=Opinion("kv_append", "append", pages=(tall, wide)),
            paged_attention=Opinion("paged_attention", "attend", pages=(wide, tall)),
        ),
        choices=choices,
    )
    caches = [step.need for step in steps if step.need.kv]
    assert {need.kv for need in caches} == {"tall"}
    assert {need.operands["cache"].dtype for need in caches} == {DType.F16}
    assert choices.caches == {"cache.full": tall}


def test_needs_name_the_live_count_of_each_operand():
    steps = planned(everything())
    heads = [step.need for step in steps if step.node.op.name == "linear"]
    assert [need.operands["x"].live for need in heads] == ["T"] * (len(heads) - 1) + ["R"]
    begin = steps[0].need.operands
    assert (begin["updates"].live, begin["cu_q"].live, begin["row_slot"].live) == ("U", "S+1", "S")
    assert (begin["slots"].live, heads[0].operands["weight"].live) == ("", "")
