"""Matching finds exactly the declared data flow and never hides a value that somebody else reads."""

import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace
from random_programs import program_values, random_programs

from atlas_core.contracts.ops import FusedCall, FusedOp
from atlas_core.model.interpreter import Interpreter
from atlas_core.model.matching import Pattern, Uses, match
from atlas_core.model.program import Program, Recorder, Segment
from atlas_core.ops.fused import compose, unrolled
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
        if node:  # what is packed, and what it is called, follows from this order: the same in every process
            assert list(node.operands) == [operand.name for operand in node.op.operands]
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


LINK = FusedOp(
    "links",
    (
        FusedCall("rms_norm", {"x": "x", "weight": "w", "y": "normed"}, {"eps": "eps"}),
        FusedCall("add", {"x": "x", "z": "normed", "y": "y"}),
    ),
    ("y",),
    carried=("x", "y"),
)


def chained(links: int, eps: float = 1e-5, leak: bool = False) -> Program:
    """So many links behind an addition; the last has ``eps``, and with ``leak`` what it hides is a result."""
    recorder = Recorder()
    a, h = (recorder.value(name, "activation", ("T", 4), DType.F32) for name in "ah")
    recorder.node(PRIMITIVES["add"], {"x": a, "z": a, "y": h}, {})
    for link in range(links):
        w = recorder.value(f"w{link}", "weight", (4,))
        normed, y = (recorder.fresh(name, ("T", 4), DType.F32) for name in (f"normed{link}", f"y{link}"))
        recorder.node(
            PRIMITIVES["rms_norm"], {"x": h, "weight": w, "y": normed}, {"eps": eps if link == links - 1 else 1e-5}
        )
        recorder.node(PRIMITIVES["add"], {"x": h, "z": normed, "y": y}, {})
        h = y
    recorder.end_segment("all")
    return recorder.finish((h, normed) if leak else (h,))


@pytest.mark.parametrize("links", [1, 2, 5])
def test_a_chain_is_found_whole_at_its_first_link_and_computes_the_same(links):
    program, pattern = chained(links), Pattern.of(LINK, PRIMITIVES)
    uses, end = Uses(program), len(program.nodes)
    found = [pattern.find(program.nodes, start, end, uses) for start in range(end)]
    assert [start for start, each in enumerate(found) if each] == [1]
    whole, node = found[1]
    assert len(whole.fused.body) == 2 * links
    assert [node.operands[f"w.{link}"].name for link in range(links)] == [f"w{link}" for link in range(links)]
    assert node.operands["x"].name == "h"
    assert node.operands["y"] == program.results[0]
    rng = np.random.default_rng(links)
    arrays = {"x": rng.standard_normal((3, 4)).astype(np.float32)}
    arrays |= {f"w.{link}": rng.standard_normal(4).astype(np.float32) for link in range(links)}
    want = arrays["x"]
    for link in range(links):
        want = want + want / np.sqrt((want * want).mean(-1, keepdims=True) + 1e-5) * arrays[f"w.{link}"]
    compose(unrolled(LINK, links, PRIMITIVES), PRIMITIVES).reference(arrays, {"eps": 1e-5})
    np.testing.assert_allclose(arrays["y"], want, rtol=1e-5)


FIRST = FusedCall("add", {"x": "start", "z": "start", "y": "x"})
LAST = FusedCall("silu_mul", {"gate": "y", "up": "y", "y": "end"})


def around(links: int) -> Program:
    """A chain behind an addition, whose end is multiplied; both ends are results."""
    recorder = Recorder()
    a, h = (recorder.value(name, "activation", ("T", 4), DType.F32) for name in "ah")
    recorder.node(PRIMITIVES["add"], {"x": a, "z": a, "y": h}, {})
    for link in range(links):
        w = recorder.value(f"w{link}", "weight", (4,))
        normed, y = (recorder.fresh(name, ("T", 4), DType.F32) for name in (f"normed{link}", f"y{link}"))
        recorder.node(PRIMITIVES["rms_norm"], {"x": h, "weight": w, "y": normed}, {"eps": 1e-5})
        recorder.node(PRIMITIVES["add"], {"x": h, "z": normed, "y": y}, {})
        h = y
    end = recorder.fresh("end", ("T", 4), DType.F32)
    recorder.node(PRIMITIVES["silu_mul"], {"gate": h, "up": h, "y": end}, {})
    recorder.end_segment("all")
    return recorder.finish((h, end))


@pytest.mark.parametrize("links", [1, 3])
def test_a_chain_may_have_a_beginning_and_an_end_of_its_own(links):
    whole = replace(LINK, before=(FIRST,), after=(LAST,), outputs=("y", "end"))
    program, nodes = around(links), 2 * links + 2
    found = [Pattern.of(whole, PRIMITIVES).find(program.nodes, start, nodes, Uses(program)) for start in range(nodes)]
    assert [start for start, each in enumerate(found) if each] == [0]
    pattern, node = found[0]
    assert [call.op for call in pattern.fused.body] == ["add", *["rms_norm", "add"] * links, "silu_mul"]
    assert {name: node.operands[name].name for name in ("start", "y", "end")} == {
        "start": "a", "y": program.results[0].name, "end": program.results[1].name
    }  # fmt: skip
    rng = np.random.default_rng(links)
    arrays = {"start": rng.standard_normal((3, 4)).astype(np.float32)}
    arrays |= {f"w.{link}": rng.standard_normal(4).astype(np.float32) for link in range(links)}
    want = 2 * arrays["start"]
    for link in range(links):
        want = want + want / np.sqrt((want * want).mean(-1, keepdims=True) + 1e-5) * arrays[f"w.{link}"]
    pattern.op.reference(arrays, {"eps": 1e-5})
    np.testing.assert_allclose(arrays["y"], want, rtol=1e-5)
    np.testing.assert_allclose(arrays["end"], want * want / (1 + np.exp(-want)), rtol=1e-5)


@pytest.mark.parametrize("missing", ["before", "after"])
def test_a_chain_without_its_beginning_or_end_is_no_match(missing):
    whole = replace(LINK, before=(FIRST,), after=(LAST,), outputs=("y", "end"))
    program = around(2)
    start, end = (1, len(program.nodes)) if missing == "before" else (0, len(program.nodes) - 1)
    pattern = Pattern.of(whole, PRIMITIVES)
    assert not any(pattern.find(program.nodes, at, end, Uses(program)) for at in range(start, end))


@pytest.mark.parametrize("program", [chained(4, eps=1e-6), chained(3, leak=True)])
def test_a_chain_whose_links_differ_or_are_looked_into_is_not_taken_for_one(program):
    pattern, end = Pattern.of(LINK, PRIMITIVES), len(program.nodes)
    found = [pattern.find(program.nodes, start, end, Uses(program)) for start in range(end)]
    assert all(each is None or len(each[0].fused.body) < end - 1 for each in found)


def test_what_says_where_in_a_cache_a_link_works_is_its_own():
    append = FusedCall(
        "kv_append",
        {"k": "x", "v": "v", "positions": "p", "token_row": "r", "row_slot": "s", "slots": "t", "cache": "c"},
        {name: name for name in PRIMITIVES["kv_append"].attrs},
    )
    link = FusedOp("appends", (append, FusedCall("add", {"x": "x", "z": "v", "y": "y"})), ("y",), carried=("x", "y"))
    op = compose(unrolled(link, 3, PRIMITIVES), PRIMITIVES)
    assert {name for name in op.attrs if name.startswith("layer")} == {"layer.0", "layer.1", "layer.2"}
    assert [operand.name for operand in op.operands].count("c") == 1


def test_an_op_tells_whether_its_parts_hand_on_activations():
    norm = FusedCall("rms_norm", {"x": "x", "weight": "n", "y": "normed"}, {"eps": "eps"})
    linear = FusedCall("linear", {"x": "normed", "weight": "w", "y": "y"})
    assert compose(FusedOp("norm_linear", (norm, linear), ("y",)), PRIMITIVES).within
    assert not compose(FusedOp("both", (norm, linear), ("normed", "y")), PRIMITIVES).within
