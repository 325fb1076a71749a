import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.engine.failures import from_failure, to_failure
from atlas_core.engine.wire import MAX_FRAME, VERSION, Configure, Frames, check_hello, decode, encode
from atlas_core.vocab import errors
from atlas_core.vocab.errors import AtlasError, DeviceError, EngineError, RequestError
from atlas_core.vocab.messages import (
    Abort,
    Delta,
    Drain,
    Failure,
    Faulted,
    Gauges,
    Generate,
    Hello,
    LedgerEntry,
    Position,
    Progress,
    Ready,
    StepResult,
    TokenLogprob,
)
from atlas_core.vocab.sampling import SamplingParams

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.floats(allow_nan=False)
counts = st.integers(0, 2**32)
maybe = words | st.none()
failures = st.builds(
    Failure, words, words, words, words, words, maybe, maybe, st.none() | st.floats(0, 100),
)  # fmt: skip
entries = st.builds(TokenLogprob, counts, words, numbers, st.binary(max_size=4))
positions = st.builds(Position, entries, st.lists(entries, max_size=3).map(tuple))
deltas = st.builds(
    Delta, words, st.lists(counts, max_size=3).map(tuple), words, st.lists(positions, max_size=2).map(tuple),
    st.sampled_from([None, "stop", "length", "abort", "error"]), maybe, counts, counts, counts, st.none() | failures, counts,
    st.none() | numbers, st.lists(positions, max_size=2).map(tuple), st.binary(max_size=8),
)  # fmt: skip
gauges = st.builds(Gauges, counts, counts, counts, counts, counts, counts)
sampling = st.builds(
    SamplingParams,
    temperature=numbers,
    logit_bias=st.lists(st.tuples(counts, numbers), max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | counts,
    stop=st.lists(words, max_size=2).map(tuple),
    stop_token_ids=st.lists(counts, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
ledger = st.builds(LedgerEntry, words, st.floats(0, 10), counts)
messages = st.one_of(
    st.builds(Generate, words, st.lists(counts, max_size=9).map(tuple), sampling, numbers),
    st.builds(Abort, words),
    st.builds(Drain, numbers),
    st.builds(StepResult, st.lists(deltas, max_size=3).map(tuple), gauges),
    st.builds(Progress, words, counts, counts, words),
    st.builds(
        Ready, counts, counts, counts, words, st.lists(ledger, max_size=2).map(tuple),
        st.lists(st.tuples(words, counts), max_size=2).map(tuple),
    ),
    st.builds(Faulted, failures),
    st.builds(Hello, counts, st.lists(st.tuples(words, words), max_size=2).map(tuple)),
    st.builds(Configure, words, st.binary(max_size=9)),
)  # fmt: skip


@given(st.lists(messages, max_size=5), st.randoms(use_true_random=False))
def test_messages_survive_any_cutting_of_the_stream(items, random):
    stream = b"".join(encode(item) for item in items)
    frames = Frames()
    got = []
    while stream:
        cut = random.randint(1, len(stream))
        got += [decode(payload) for payload in frames.feed(stream[:cut])]
        stream = stream[cut:]
    assert got == items
    assert [type(item) for item in got] == [type(item) for item in items]


@given(st.binary(max_size=80))
def test_garbage_is_an_engine_error_and_nothing_else(data):
    try:
        message = decode(data)
    except EngineError:
        return
    assert encode(message)


@given(messages, st.data())
def test_a_damaged_message_is_refused_or_still_a_message(message, data):
    payload = bytearray(encode(message)[4:])
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(payload))
    except EngineError:
        return
    assert encode(found)


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(EngineError, match="unknown type 'Shutdown'"):
        decode(msgspec.msgpack.encode(("Shutdown", {})))


def test_a_value_of_another_type_is_refused():
    with pytest.raises(EngineError, match="a Abort is malformed"):
        decode(msgspec.msgpack.encode(("Abort", {"id": 5})))


def test_an_oversized_frame_is_refused_before_it_has_come():
    with pytest.raises(EngineError, match=f"a frame of {MAX_FRAME + 1} bytes"):
        list(Frames().feed(struct.pack("<I", MAX_FRAME + 1)))
    with pytest.raises(EngineError, match="is too long"):
        encode(Abort("x" * MAX_FRAME))


@pytest.mark.parametrize("message", [Abort("half \ud83c"), Generate("a", (1,), SamplingParams(seed=2**64))])
def test_what_cannot_be_sent_is_an_error_of_the_sender(message):
    with pytest.raises(EngineError, match="cannot be encoded"):
        encode(message)


def test_the_greeting_decides_whether_the_peers_understand_each_other():
    assert check_hello(Hello(VERSION)) == Hello(VERSION)
    with pytest.raises(EngineError, match=f"version {VERSION + 1} and this is version {VERSION}"):
        check_hello(Hello(VERSION + 1))
    plugins = (("a", "1 aa"), ("b", "1 bb"))
    assert check_hello(Hello(VERSION, plugins), plugins) == Hello(VERSION, plugins)
    with pytest.raises(EngineError, match="the same plugins") as caught:
        check_hello(Hello(VERSION, plugins[:1]), plugins)
    assert caught.value.why == "b is 1 bb here and not installed there"
    with pytest.raises(EngineError, match="began with Abort"):
        check_hello(Abort("a"))


@pytest.mark.parametrize(
    "error",
    [
        RequestError("a", "b", "c", kind="overloaded", field="x.y", code="z", retry_after=2.5),
        EngineError("a", "b", "c", state="draining"),
        DeviceError("a", "b", "c", sticky=True),
        DeviceError("a"),
        *(kind("a", "b", "c") for kind in (errors.BudgetError, errors.KernelError, errors.CheckpointError, AtlasError)),
    ],
)
def test_an_error_comes_back_as_it_was(error):
    back = from_failure(to_failure(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)


def test_a_foreign_exception_is_a_defect_and_says_which():
    back = from_failure(to_failure(KeyError("x")))
    assert isinstance(back, EngineError)
    assert back.why == "KeyError: 'x'"
    assert type(from_failure(Failure("ThirdPartyError", "a"))) is AtlasError
    assert type(from_failure(Failure("annotations", "a"))) is AtlasError
