import asyncio
import gzip
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.server.body import MAX_DEPTH, parse_object, read_body
from atlas_core.vocab.errors import RequestError


def read(chunks, headers=None, limit=100):
    async def source():
        for chunk in chunks:
            yield chunk

    return asyncio.run(read_body(headers or {}, source(), limit))


def test_chunks_are_joined_up_to_the_limit():
    assert read([b"ab", b"", b"c"], limit=3) == b"abc"


@pytest.mark.parametrize("chunks", [[b"x" * 101], [b"x" * 60, b"x" * 60]])
def test_more_than_the_limit_is_too_large(chunks):
    with pytest.raises(RequestError) as caught:
        read(chunks)
    assert caught.value.kind == "too_large"


def test_a_declared_length_is_refused_before_anything_is_read():
    async def source():
        raise AssertionError("was read")
        yield b""

    with pytest.raises(RequestError) as caught:
        asyncio.run(read_body({"content-length": "200000000"}, source(), 100))
    assert caught.value.kind == "too_large"


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_encoded_bodies_are_refused(encoding):
    with pytest.raises(RequestError) as caught:
        read([gzip.compress(b"{}")], {"content-encoding": encoding})
    assert (caught.value.kind, caught.value.code) == ("unsupported", "unsupported_encoding")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"a":1,}', "invalid_json"), (b'{"a":1', "invalid_json"), (b"", "invalid_json"), (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"), (b"null", "invalid_json"), (b"3", "invalid_json"), (b'{"a":"\xff"}', "invalid_utf8"),
        (b'{"a":"\xed\xa0\xbc"}', "invalid_utf8"), (rb'{"a":"half: \ud83c"}', "invalid_unicode"),
        (rb'{"a":"\udf0a tail"}', "invalid_unicode"), (rb'{"\uDF0a":1}', "invalid_unicode"),
        (rb'{"a":[[{"b":["\ud83c"]}]]}', "invalid_unicode"), (b'{"a":NaN}', "invalid_json"),
        (b'{"a":-Infinity}', "invalid_json"), (b'{"a":1,"a":2}', "invalid_json"), (b'{"a":' + b"1" * 5000 + b"}", "invalid_json"),
        (b"[" * 10000 + b"]" * 10000, "invalid_json"), (b'{"a":' + b"[" * 100000, "invalid_json"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "invalid_json"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_quickly(data, code):
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        parse_object(data)
    assert caught.value.code == code
    assert caught.value.kind == "invalid"
    assert time.monotonic() - start < 1


def test_whole_surrogate_pairs_and_escaped_backslashes_are_fine():
    assert parse_object(rb'{"a":"\ud83d\ude00","b":"\\ud83c"}') == {"a": "😀", "b": "\\ud83c"}


def test_the_deepest_body_is_read():
    inner = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)
    assert parse_object(b'{"a":' + inner + b"}")["a"] == json.loads(inner)


@given(
    st.binary(max_size=200) | st.text(alphabet='{}[]":,\\ud83e+-.0123456789anulltrefs ', max_size=60).map(str.encode)
)
def test_any_bytes_give_an_object_or_a_request_error(data):
    try:
        found = parse_object(data)
    except RequestError as error:
        assert error.code in ("invalid_json", "invalid_utf8", "invalid_unicode")
    else:
        assert found == json.loads(data)


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
                                               lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)))  # fmt: skip
def test_what_json_writes_is_read_back(value):
    assert parse_object(json.dumps(value).encode()) == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode()) == value
