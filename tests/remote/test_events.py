from hypothesis import given
from hypothesis import strategies as st

from atlas_core.remote.events import event_data

TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1)


def test_events_comments_and_other_fields():
    stream = b': ping\n\nevent: x\ndata: {"a":1}\nid: 3\n\ndata:one\r\ndata: two\r\n\r\n\n\ndata: [DONE]\n\n'
    assert list(event_data(stream.splitlines(keepends=True))) == ['{"a":1}', "one\ntwo", "[DONE]"]


def test_what_is_cut_is_not_an_event():
    assert list(event_data([b"data: whole\n", b"\n", b"data: half"])) == ["whole"]
    assert list(event_data([b"data: whole\n", b"\n", b"data: half\n"])) == ["whole"]
    assert list(event_data([])) == []


@given(st.lists(st.lists(TEXT, min_size=1)), st.booleans())
def test_what_was_written_is_read(events, crlf):
    end = b"\r\n" if crlf else b"\n"
    lines = [line for event in events for line in (*(b"data: " + part.encode() + end for part in event), end)]
    assert list(event_data(lines)) == ["\n".join(event) for event in events]
