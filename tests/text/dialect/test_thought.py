"""Thoughts and answers apart: the fixtures in every chunking, and the state that the prompt's end tells."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.contracts.dialect import ReasoningSyntax
from atlas_core.text.dialect.thought import Place, Splitter, Thought, continued, opening

FIXTURES = json.loads((Path(__file__).parents[2] / "data" / "parser_fixtures.json").read_text())["reasoning"]
THINK = ReasoningSyntax("<think>", "</think>")


def split(text, state, pieces=None):
    splitter = Splitter(THINK, state)
    found = [splitter.push(piece) for piece in (pieces or [text])] + [splitter.finish()]
    return "".join(part.reasoning for part in found), "".join(part.content for part in found)


@pytest.mark.parametrize("case", FIXTURES, ids=lambda case: case["id"])
def test_the_fixtures_in_pieces_of_every_size(kit, case):
    state = (
        opening(case["prompt_tail"], THINK) if "prompt_tail" in case else "open" if case["forced_open"] else "unsaid"
    )
    for size in range(1, len(case["text"]) + 1):
        reasoning, content = split("", state, kit.cuts(case["text"], size))
        assert (reasoning or None, content or None) == (case["reasoning"], case["content"])


@pytest.mark.parametrize(
    ("pieces", "state", "reasoning", "content"),
    [
        (["a</th", "ink>b"], "open", "a", "b"),
        (["a</think>b"], "open", "a", "b"),
        (["a</think>b</think>c"], "open", "a", "bc"),
        (["a</think>\n\n</think>\n\nb"], "open", "a", "b"),
        (["a\n\nb\n</think>"], "open", "a\n\nb", ""),
        (["never closed\n"], "open", "never closed\n", ""),
        (["  <think>\nx</think>y"], "unsaid", "x", "y"),
        (["say <think> to think"], "unsaid", "", "say <think> to think"),
        (["say </think>"], "unsaid", "", "say </think>"),
        (["<thi"], "unsaid", "", "<thi"),
        (["a</thi"], "open", "a</thi", ""),
        (["\n\nb</thi"], "closed", "", "b</thi"),
        ([" \n"], "unsaid", "", " \n"),
    ],
)
def test_splits(pieces, state, reasoning, content):
    text = "".join(pieces)
    for way in (pieces, [text], list(text)):
        assert split("", state, way) == (reasoning, content)


@pytest.mark.parametrize(
    ("tail", "state"),
    [
        ("<|assistant|>\n<think>\n", "open"), ("<|assistant|>", "unsaid"), ("<think>\n\n</think>\n\n", "closed"),
        ("<think>x</think>y<|assistant|>", "unsaid"), ("the tag <think> is<|assistant|>", "unsaid"),
    ],
)  # fmt: skip
def test_only_the_end_of_the_prompt_counts(tail, state):
    assert opening("[user] <think> " + tail, THINK) == state


@pytest.mark.parametrize(
    ("text", "state"),
    [("", "unsaid"), ("Hello", "closed"), ("<think>\nso", "open"), ("<think>so</think>\nwell", "closed")],
)
def test_a_turn_that_is_continued(text, state):
    assert continued(text, THINK) == state


WORDS = ["<think>", "</think>", "\n", "a", " ", "<", "</", "think", ">"]


@given(
    words=st.lists(st.sampled_from(WORDS), max_size=14),
    state=st.sampled_from(["open", "closed", "unsaid"]),
    data=st.data(),
)
def test_any_pieces_give_the_same(words, state, data):
    text = "".join(words)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert split("", state, pieces) == split(text, state)


@given(words=st.lists(st.sampled_from(WORDS), max_size=14), opened=st.booleans())
def test_parts_are_the_text(words, opened):
    thought = Thought(THINK, opened=opened)
    parts = [part for word in words for part in thought.push(word)] + thought.finish()
    assert "".join(part.text for part in parts) == "".join(words)
    places = [part.place for part in parts]
    assert places == sorted(places, key=[Place.THOUGHT, Place.ANSWER].index)
