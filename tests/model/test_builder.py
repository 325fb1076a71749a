"""The words for recurrent states: where they lie, and who may have them."""

import pytest

from atlas_core.model.builder import ForwardBuilder, StepLayout
from atlas_core.ops.step import SlotLayout
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.model import CacheSpec, ModelSpec

CACHES = (
    CacheSpec("early", "recurrent", 2, state_shape=(3, 8)),
    CacheSpec("first", "full", 1, 1, 4),
    CacheSpec("late", "recurrent", 1, state_shape=(2, 2, 4)),
    CacheSpec("second", "sliding", 1, 1, 4, 16),
)
SPEC = ModelSpec("toy", 8, 3, 32, 64, DType.F32, CACHES, (), None, tied_embeddings=False, family=None)
LAYOUT = StepLayout(SlotLayout(5, (4, 6), 0), 16, DType.BF16, 1)


@pytest.fixture
def step():
    return ForwardBuilder(SPEC, LAYOUT)


def values(step, width=8):
    return step.activation("x", "T", width)


def recorded(step):
    """Nodes after the step's beginning."""
    step._recorder.end_segment("forward")
    return step._recorder.finish(()).nodes[1:]


def test_a_state_is_float32_for_every_layer_and_slot(step):
    step.causal_conv1d(values(step), step.weight("w", 8, 4), "early", 1)
    two = step.activation("a", "T", 2)
    step.gated_delta_rule(
        values(step, 16), (two, two), (step.weight("l", 2), step.weight("d", 2)), "late", 0, (2, 2), (2, 4), 0.5
    )
    convolution, rule = recorded(step)
    assert convolution.operands["state"].shape == (2, 5, 3, 8)
    assert convolution.operands["state"].dtype == DType.F32
    assert convolution.attrs == {"layer": 1, "slot_stride": LAYOUT.slots.stride}
    assert rule.operands["state"].shape == (1, 5, 2, 2, 4)
    assert rule.operands["y"].shape == ("T", 8)


def test_block_tables_count_groups_with_pages_only(step):
    for group in ("first", "second"):
        step.attention(values(step, 4), values(step, 4), values(step, 4), group, 0, 1, 1.0)
    offsets = [node.attrs["table_offset"] for node in recorded(step) if node.op.name == "paged_attention"]
    assert offsets == [LAYOUT.slots.table_offset(0), LAYOUT.slots.table_offset(1)]


def test_pages_and_states_are_not_mistaken_for_one_another(step):
    with pytest.raises(ValueError, match=r"early is not among \['first', 'second'\], which have pages"):
        step.attention(values(step), values(step), values(step), "early", 0, 1, 1.0)
    with pytest.raises(ValueError, match=r"first is not among \['early', 'late'\], which need no pages"):
        step.causal_conv1d(values(step), step.weight("w", 8, 4), "first", 0)
