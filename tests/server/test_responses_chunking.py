"""However the engine cuts an answer into deltas, the events of a response say what the whole response says."""

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.contracts.dialect import Tool
from atlas_core.server.answer import Reading
from atlas_core.server.responses.answer import Asked, ResponseWriter
from atlas_core.server.responses.assembly import Shape
from atlas_core.server.responses.schema import ResponsesRequest
from atlas_core.server.turn import Prompt, Turn
from atlas_core.text.dialect.dialects import Hermes, Think
from atlas_core.vocab.errors import EngineError
from atlas_core.vocab.messages import Delta, Generate, Position, TokenLogprob
from atlas_core.vocab.sampling import SamplingParams

WORDS = (
    "<think>", "</think>", "a", " ", "\n", "é😀", "<", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": "é"}}',
    '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
    '<tool_call>\n{"name": "p", "arguments": {"input": "a\\n\\ud83d\\ude00b"}}\n</tool_call>', '<tool_call>{"name": "p", "arguments": {"inp',
)  # fmt: skip
READING = Reading((Tool("f", {}), Tool("p", {})), Hermes().tools, Think().reasoning)


def writer(opening="unsaid", shape=Shape(frozenset("p")), logprobs=None, reading=READING):  # noqa: B008 it is frozen
    sequence = Generate("resp_1-0", (1, 2), SamplingParams(logprobs=logprobs))
    turn = Turn("resp_1", 7, "m", "f", (Prompt((1, 2), opening=opening),), 1, (sequence,), reading=reading, stream=True)
    numbers = itertools.count()
    return ResponseWriter(
        turn, Asked(ResponsesRequest(), True), shape, lambda prefix: f"{prefix}{next(numbers)}", lambda: 9.0
    )


def deltas(text, cuts, finish, *, logprobs=False):
    """``text`` in pieces; a token a byte."""
    data = text.encode()
    sent, made = "", []
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for low, high in itertools.pairwise(places):
        readable = data[:high].decode(errors="ignore")
        entries = [
            TokenLogprob(byte, bytes([byte]).decode(errors="replace"), -1.0, bytes([byte])) for byte in data[low:high]
        ]
        made.append(
            Delta(
                "resp_1-0", tuple(data[low:high]), readable[len(sent) :], tuple(Position(entry, ()) for entry in entries) if logprobs else (),
                prompt_tokens=2, completion_tokens=high,
            )
        )  # fmt: skip
        sent = readable
    return [*made[:-1], made[-1]._replace(finish=finish)]


def events_of(data):
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", len(found))
        found.append(event)
    return found


def streamed(one, pairs):
    data = one.opening() + b"".join(one.chunk(0, delta) for delta in pairs) + one.closing([])
    return events_of(data)


TEXTS = {
    "response.output_text": ("content", "text"), "response.reasoning_text": ("content", "text"),
    "response.reasoning_summary_text": ("summary", "text"),
    "response.function_call_arguments": (None, "arguments"), "response.custom_tool_call_input": (None, "input"),
}  # fmt: skip


def put_together(events):
    """The output as a client knows it that reads nothing but deltas; the order of the events is checked on the way."""
    output, open_item, part = [], None, None
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None
            open_item = json.loads(json.dumps(event["item"]))
            assert event["output_index"] == len(output)
        elif kind == "response.output_item.done":
            assert part is None
            assert event["item"]["id"] == open_item["id"]
            output.append(open_item | {"status": event["item"]["status"]})
            assert event["item"] | {"encrypted_content": None} == output[-1] | {"encrypted_content": None}
            open_item = None
        else:
            assert (event["item_id"], event["output_index"]) == (open_item["id"], len(output))
            if kind.endswith("part.added"):
                place = "summary" if "summary" in kind else "content"
                open_item[place].append(event["part"])
                part = event["part"]
            elif kind.endswith("part.done"):
                assert event["part"] == part
                part = None
            else:
                place, name = TEXTS[kind.rpartition(".")[0]]
                target = open_item if place is None else open_item[place][0]
                if kind.endswith(".delta"):
                    assert event["delta"] or place
                    target[name] += event["delta"]
                    if "logprobs" in event:
                        target["logprobs"] += event["logprobs"]
                else:
                    assert event[name] == target[name]
    assert open_item is None
    return output


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=10), cuts=st.lists(st.integers(0, 300), max_size=6),
    finish=st.sampled_from(["stop", "length"]), opening=st.sampled_from(["open", "closed", "unsaid"]),
    summary=st.booleans(), sealed=st.booleans(), logprobs=st.booleans(),
)  # fmt: skip
def test_joined_events_are_the_whole_response(words, cuts, finish, opening, summary, sealed, logprobs):
    text = "".join(words)
    shape = Shape(frozenset("p"), {"f": ("s", "own")}, summary, sealed)
    asked = 0 if logprobs else None
    events = streamed(writer(opening, shape, asked), deltas(text, cuts, finish, logprobs=logprobs))
    last = events[-1]["response"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert (last["status"], last["incomplete_details"]) == (
        ("completed", None) if finish == "stop" else ("incomplete", {"reason": "max_output_tokens"})
    )
    told = put_together(events[2:-1])
    for item in last["output"]:
        assert bool(item.pop("encrypted_content", None)) == (sealed and item["type"] == "reasoning")
    assert told == last["output"] != []
    whole = writer(opening, shape, asked)
    whole.chunk(0, deltas(text, [], finish, logprobs=logprobs)[0])
    assert _bare(json.loads(json.dumps(whole.body))) == _bare(last)


def _bare(body):
    """``body`` without what is drawn anew (ids of calls) or compared by the next test (log-probabilities)."""
    calls = itertools.count()
    for item in body["output"]:
        item.pop("encrypted_content", None)
        if "call_id" in item:
            item["call_id"] = next(calls)
        for part in item.get("content", ()):
            part.pop("logprobs", None)
    return body


@settings(deadline=None)
@given(
    thought=st.sampled_from(["", "<think>\nfar away\n</think>\n\n"]), text=st.text(alphabet="aé😀\n. ", max_size=20),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)  # fmt: skip
def test_the_tokens_of_a_message_are_those_of_its_text(thought, text, cuts):
    one = writer("unsaid", logprobs=0)
    events = streamed(one, deltas(thought + text, cuts, "stop", logprobs=True))
    (message,) = [item for item in events[-1]["response"]["output"] if item["type"] == "message"] or [None]
    if message is None:
        assert thought
        return
    part = message["content"][0]
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"]
    told = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert told == part["logprobs"]


def test_an_answer_without_a_word_is_a_message():
    events = streamed(writer(), deltas("", [], "stop"))
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_a_stream_that_breaks_off_has_failed():
    one = writer()
    data = one.opening() + one.chunk(0, deltas("Hello", [3], "stop")[0])
    data += one.failed(EngineError("the engine is gone", "it was closed", "", state="gone"))
    events = events_of(data)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine is gone: it was closed"}
    assert (last["response"]["usage"], last["response"]["completed_at"]) == (None, None)
