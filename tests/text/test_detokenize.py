import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.text.detokenize import Detokenizer


def stream(pieces):
    """The deltas of tokens that have these bytes."""
    detokenizer = Detokenizer(dict(enumerate(pieces)).__getitem__)
    return [*(detokenizer.push(token) for token in range(len(pieces))), detokenizer.finish()]


@pytest.mark.parametrize(
    ("pieces", "deltas"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["", "😀", ""]),
        ([b"\xc4", b"\x8f"], ["", "ď", ""]),
        ([b"e", b"\xcc\x81"], ["e", "\u0301", ""]),
        ([b"a\xf0\x9f"], ["a", "\ufffd"]),
        ([b"\xef\xbf\xbd", b"x"], ["\ufffd", "x", ""]),
        ([b"\xff", b"\xf0\x9f", b"x"], ["\ufffd", "", "\ufffdx", ""]),
        ([b"", b"a", b""], ["", "a", "", ""]),
    ],
)
def test_characters_over_token_borders(pieces, deltas):
    assert stream(pieces) == deltas


def test_a_joined_emoji_cut_at_every_place():
    data = "👩\u200d💻".encode()
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            deltas = stream([data[:first], data[first:second], data[second:]])
            assert "".join(deltas) == "👩\u200d💻"


@given(st.lists(st.binary(max_size=5), max_size=8))
def test_joined_deltas_equal_the_whole_decode(pieces):
    deltas = stream(pieces)
    assert "".join(deltas) == b"".join(pieces).decode("utf-8", errors="replace")
    "".join(deltas).encode("utf-8")
