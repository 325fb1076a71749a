"""Matching finds exactly the declared data flow and never hides a value that somebody else reads."""

import numpy as np
import pytest
from hypothesis import given
from random_programs import program_values, random_programs

from atlas_core.contracts.ops import FusedCall, FusedOp
from atlas_core.model.interpreter import Interpreter
from atlas_core.model.matching import Pattern, Uses, match
from atlas_core.model.program import Program, Recorder, Segment
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.dtype import DType

NORM = FusedCall("rms_norm", {"x": "h", "weight": "w", "y": "y"}, {"eps": "eps"})
ADD = FusedCall("add", {"x": "x", "z": "z", "y": "h"})
HIDING = Pattern.of(FusedOp("add_norm", (ADD, NORM), ("y",)), PRIMITIVES)
KEEPING = Pattern.of(FusedOp("add_norm_keep", (ADD, NORM), ("h", "y")), PRIMITIVES)


@given(random_programs())
def test_a_match_is_taken_exactly_when_nothing_outside_sees_what_it_hides(program):
    uses = Uses(program)
    for segment in program.segments:
        for start in range(segment.start, segment.end - 1):
            first, second = program.nodes[start : start + 2]
            flows = (
                (first.op.name, second.op.name) == ("add", "rms_norm")
                and second.operands["x"] == first.operands["y"]
                and first.operands["x"] != first.operands["z"]
            )
            others = [n for i, n in enumerate(program.nodes) if i not in (start, start + 1)]
            seen = first.op.name == "add" and (
                first.operands["y"] in program.results
                or any(first.operands["y"] in node.operands.values() for node in others)
            )
            assert (match(KEEPING, program.nodes, start, segment.end, uses) is not None) == flows
            assert (match(HIDING, program.nodes, start, segment.end, uses) is not None) == (flows and not seen)


@given(random_programs())
def test_replacing_what_matched_changes_no_result(program):
    uses, nodes, index = Uses(program), [], 0
    cut = {segment.end for segment in program.segments}
    while index < len(program.nodes):
        end = min(c for c in cut if c > index)
        node = match(HIDING, program.nodes, index, end, uses) or match(KEEPING, program.nodes, index, end, uses)
        nodes.append(node or program.nodes[index])
        index += 2 if node else 1
    fused = Program(tuple(nodes), (Segment("all", 0, len(nodes)),), program.results)
    plain, other = (Interpreter(p, program_values(program)) for p in (program, fused))
    plain.run()
    other.run()
    for value in program.results:
        np.testing.assert_array_equal(other.values[value.name], plain.values[value.name])


def test_a_match_never_crosses_the_end_of_a_segment():
    recorder = Recorder()
    x, z, h, y = (recorder.value(name, "activation", ("T", 4), DType.F32) for name in "xzhy")
    recorder.node(PRIMITIVES["add"], {"x": x, "z": z, "y": h}, {})
    recorder.end_segment("a")
    recorder.node(
        PRIMITIVES["rms_norm"], {"x": h, "weight": recorder.value("w", "weight", (4,)), "y": y}, {"eps": 1e-5}
    )
    recorder.end_segment("b")
    program = recorder.finish((y,))
    assert match(HIDING, program.nodes, 0, 1, Uses(program)) is None
    assert match(HIDING, program.nodes, 0, 2, Uses(program)) is not None


def test_attributes_that_a_pattern_shares_must_be_equal():
    twice = FusedOp(
        "two_norms",
        (NORM, FusedCall("rms_norm", {"x": "y", "weight": "w2", "y": "y2"}, {"eps": "eps"})),
        ("y2",),
    )
    for second, matches in ((1e-5, True), (1e-6, False)):
        recorder = Recorder()
        h, y, y2 = (recorder.value(name, "activation", ("T", 4), DType.F32) for name in ("h", "y", "y2"))
        w, w2 = (recorder.value(name, "weight", (4,)) for name in ("w", "w2"))
        recorder.node(PRIMITIVES["rms_norm"], {"x": h, "weight": w, "y": y}, {"eps": 1e-5})
        recorder.node(PRIMITIVES["rms_norm"], {"x": y, "weight": w2, "y": y2}, {"eps": second})
        recorder.end_segment("all")
        program = recorder.finish((y2,))
        assert (match(Pattern.of(twice, PRIMITIVES), program.nodes, 0, 2, Uses(program)) is not None) == matches


def test_an_output_that_is_never_made_is_refused():
    with pytest.raises(ValueError, match="never produces"):
        Pattern.of(FusedOp("wrong", (ADD,), ("nothing",)), PRIMITIVES)
