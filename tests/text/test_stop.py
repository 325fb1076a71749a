import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.text.stop import StopMatcher
from atlas_core.vocab.errors import RequestError

FIXTURES = json.loads((Path(__file__).parent / "data" / "stop_strings.json").read_text(encoding="utf-8"))
FIXTURES += [
    {"id": "cjk", "pieces": ["好", "的", "。再", "见"], "stop": ["。"], "text": "好的", "hit": "。"},
    {"id": "restart", "pieces": ["aa", "aa", "b"], "stop": ["aaab"], "text": "a", "hit": "aaab"},
    {"id": "longest of those that end together", "pieces": ["xabc"], "stop": ["c", "abc"], "text": "x", "hit": "abc"},
]


def run(pieces, stops, **options):
    matcher = StopMatcher(stops, **options)
    shown = []
    for piece in pieces:
        match = matcher.push(piece)
        shown.append(match.text)
        if match.hit is not None:
            return shown, match.hit
    return [*shown, matcher.finish()], None


def chunks(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture["id"])
@pytest.mark.parametrize("size", [None, 1, 2, 3, 5, 8, 1000])
def test_fixtures_however_the_text_is_cut(fixture, size):
    pieces = fixture["pieces"] if size is None else chunks("".join(fixture["pieces"]), size)
    shown, hit = run(pieces, fixture["stop"])
    assert ("".join(shown), hit) == (fixture["text"], fixture["hit"])


def reference(text, stops):
    """By definition: the shortest prefix that ends in a stop string, and the longest string that it ends in."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    text=st.text("ab\u00e9", max_size=30),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4),
    size=st.integers(1, 6),
)
def test_equals_the_definition(text, stops, size):
    shown, hit = run(chunks(text, size), stops)
    assert ("".join(shown), hit) == reference(text, stops)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_is_held_back_longer_than_needed(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for index, char in enumerate(text):
        match = matcher.push(char)
        if match.hit:
            return
        shown += match.text
        seen = text[: index + 1]
        held = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert shown == seen[: len(seen) - held]


def test_the_stop_string_itself_can_be_shown():
    shown, hit = run(["one t", "wo three"], ["two"], include=True)
    assert ("".join(shown), hit) == ("one two", "two")


def test_misuse():
    with pytest.raises(RequestError) as caught:
        StopMatcher(["a", ""])
    assert caught.value.field == "stop"
    matcher = StopMatcher(["a"])
    assert matcher.push("ba").hit == "a"
    with pytest.raises(ValueError, match="after the end"):
        matcher.push("more")
