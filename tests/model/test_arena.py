"""The arena: values that live at the same time never share memory."""

from hypothesis import given
from hypothesis import strategies as st
from random_programs import WIDTH, Opinion, random_programs

from atlas_core.model.arena import ALIGNMENT, place
from atlas_core.model.planner import Bucket, Choices, Context, plan
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import plain


def planned(program, tokens):
    names = [value.name for value in program.weights()]
    opinions = [Opinion(op, op, scratch=scratch) for op, scratch in (("embed", 10), ("add", 300), ("rms_norm", 20))]
    context = Context("any", "exact", DType.F32, dict.fromkeys(names, plain(DType.F32)), opinions, ())
    bucket = Bucket(tokens, 1, 1, 1, tokens)
    return plan(program, bucket, context, Choices()), bucket


@given(random_programs(), st.integers(1, 200))
def test_lives_that_overlap_lie_apart(program, tokens):
    segments, bucket = planned(program, tokens)
    arena = place(program, segments, bucket)
    steps = [step for segment in segments for step in segment.steps]
    lives = {}
    for index, step in enumerate(steps):
        for value in step.node.operands.values():
            if value.kind == "activation":
                size = tokens * 4 * (WIDTH if len(value.shape) == 2 else 1)
                born, _, _ = lives.get(value.name, (index, index, size))
                lives[value.name] = (born, index, size)
    for value in program.results:
        born, _, size = lives[value.name]
        lives[value.name] = (born, len(steps), size)
    assert set(arena.offsets) == set(lives)
    for name, (born, died, size) in lives.items():
        offset = arena.offsets[name]
        assert offset % ALIGNMENT == 0
        assert offset + size <= arena.nbytes
        for other, (born2, died2, size2) in lives.items():
            if other != name and born <= died2 and born2 <= died:
                assert offset + size <= arena.offsets[other] or arena.offsets[other] + size2 <= offset, (name, other)


@given(random_programs())
def test_scratch_is_the_largest_of_any_step(program):
    segments, bucket = planned(program, 3)
    used = {step.node.op.name for segment in segments for step in segment.steps}
    assert place(program, segments, bucket).scratch == (300 if "add" in used else 20 if "rms_norm" in used else 10)


def test_memory_is_used_again():
    """A chain of equal values needs two places, however long it is."""
    from atlas_core.model.program import Recorder
    from atlas_core.ops.primitives import PRIMITIVES

    recorder = Recorder()
    value = recorder.value("v0", "activation", ("T", 64), DType.F32)
    weight = recorder.value("w", "weight", (64,))
    for index in range(1, 9):
        following = recorder.value(f"v{index}", "activation", ("T", 64), DType.F32)
        recorder.node(PRIMITIVES["rms_norm"], {"x": value, "weight": weight, "y": following}, {"eps": 1e-5})
        value = following
    recorder.end_segment("all")
    program = recorder.finish((value,))
    segments, bucket = planned(program, 5)
    assert place(program, segments, bucket).nbytes == 2 * 5 * 64 * 4
