"""However the engine cuts an answer into deltas, and whatever is asked for, the stream says what the whole answer says."""

import json

from hypothesis import given
from hypothesis import strategies as st

from atlas_core.contracts.dialect import Tool
from atlas_core.server.answer import Reading
from atlas_core.server.chat import Chat
from atlas_core.server.completions import Completions
from atlas_core.server.sse import DONE, event
from atlas_core.server.turn import Output, Prompt, Turn
from atlas_core.text.dialect.dialects import Hermes, Think
from atlas_core.vocab.messages import Delta, Generate, Position, TokenLogprob
from atlas_core.vocab.sampling import SamplingParams

CHARS = st.text(alphabet='aé😀\n\u2028\u0000"\\\ufffd ', max_size=12)


@st.composite
def turns(draw):
    """A turn, and for each of its choices the deltas, cut anywhere."""
    sampling = SamplingParams(logprobs=draw(st.sampled_from([None, 0, 2])))
    choices = draw(st.integers(1, 3))
    turn = Turn(
        "id", 1, "m", "f", (Prompt((1, 2), draw(CHARS)),), choices,
        tuple(Generate(f"id-{index}", (1, 2), sampling) for index in range(choices)),
        stream=True, include_usage=draw(st.booleans()), token_ids=draw(st.booleans()),
    )  # fmt: skip
    queues = []
    for index in range(choices):
        data = draw(CHARS).encode()
        cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=5)))
        made, held = [], b""
        for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True):
            held += data[low:high]
            last = high == len(data) and len(made) == len(cuts)
            text = held.decode() if last else held.decode(errors="ignore")
            held = b"" if last else held[len(text.encode()) :]
            made.append(
                Delta(
                    f"id-{index}", tuple(data[low:high]), text, _positions(data[low:high], sampling),
                    draw(st.sampled_from(["stop", "length"])) if last else None, None, 2, high, 1,
                )
            )  # fmt: skip
        queues.append(made)
    order = draw(st.permutations([index for index, made in enumerate(queues) for _ in made]))
    return turn, [(index, queues[index].pop(0)) for index in order]


def _positions(data, sampling):
    if sampling.logprobs is None:
        return ()
    entries = [TokenLogprob(byte, bytes([byte]).decode(errors="replace"), -1.0, bytes([byte])) for byte in data]
    return tuple(Position(entry, (entry,) * sampling.logprobs) for entry in entries)


def stream(face, turn, pairs):
    writer = face.writer(turn)
    outputs = [Output() for _ in turn.sequences]
    whole = [Output() for _ in turn.sequences]
    data = b""
    for index, delta in pairs:
        outputs[index].count(delta)
        whole[index].add(delta)
        data += writer.chunk(index, delta)
    data += writer.closing(outputs)
    assert data.endswith(DONE)
    data = data.removesuffix(DONE)
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts]
    body = json.loads(json.dumps(face.whole(turn, whole)))
    if turn.include_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], body["usage"])
    assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in chunks)
    return chunks, body


@given(turns())
def test_chat(case):
    turn, pairs = case
    chunks, body = stream(Chat(), turn, pairs)
    for wanted in body["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == wanted["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content") or "" for choice in mine) == wanted["message"]["content"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [wanted["finish_reason"]]
        entries = [entry for choice in mine for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert entries == (wanted["logprobs"] or {"content": []})["content"]
        assert [token for choice in mine for token in choice.get("token_ids", [])] == wanted.get("token_ids", [])
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [[1, 2]] * turn.token_ids


WORDS = [
    "<think>",
    "</think>",
    "\n",
    "ok ",
    "<tool_call>\n",
    '{"name": "f", "arguments": ',
    '{"a": [1, "é😀"]}',
    "}",
    "\n</tool_call>",
    "<",
]
READING = Reading((Tool("f"),), Hermes.tools, Think.reasoning)


@given(words=st.lists(st.sampled_from(WORDS), max_size=12), data=st.data())
def test_calls_and_thoughts(words, data):
    """Whatever the model writes, and however it comes, a client that puts the pieces together has the whole answer."""
    text = "".join(words).encode()
    finish = data.draw(st.sampled_from(["stop", "length"]))
    opening = data.draw(st.sampled_from(["open", "closed", "unsaid"]))
    turn = Turn(
        "id", 1, "m", "f", (Prompt((1, 2), opening=opening),), 1, (Generate("id-0", (1, 2), SamplingParams()),), reading=READING,
        token_ids=True,
    )  # fmt: skip
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pairs, sent = [], ""
    for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True):
        readable = text[:high].decode(errors="ignore")
        pairs.append((0, Delta("id-0", tuple(text[low:high]), readable[len(sent) :], completion_tokens=high)))
        sent = readable
    pairs[-1] = 0, pairs[-1][1]._replace(finish=finish)
    chunks, body = stream(Chat(), turn, pairs)
    (wanted,) = body["choices"]
    content, reasoning, calls, tokens = "", "", [], []
    for choice in (chunk["choices"][0] for chunk in chunks):
        content += choice["delta"].get("content") or ""
        reasoning += choice["delta"].get("reasoning_content") or ""
        tokens += choice.get("token_ids", [])
        for piece in choice["delta"].get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    message = wanted["message"]
    assert (content, reasoning) == (message["content"] or "", message.get("reasoning_content", ""))
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    assert chunks[-1]["choices"][0]["finish_reason"] == wanted["finish_reason"]
    assert tokens == wanted["token_ids"] == list(text)


@given(turns())
def test_completions(case):
    turn, pairs = case
    chunks, body = stream(Completions(), turn, pairs)
    for wanted in body["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == wanted["index"]]
        assert "".join(choice["text"] for choice in mine) == wanted["text"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [wanted["finish_reason"]]
        assert [token for choice in mine for token in choice.get("token_ids", [])] == wanted.get("token_ids", [])
        if wanted["logprobs"]:
            for name, values in wanted["logprobs"].items():
                assert [value for choice in mine for value in choice["logprobs"][name]] == values


def test_framing():
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert event(b"[DONE]") == DONE
    for bad in (b"a\nb", b"a\rb"):
        try:
            event(bad)
        except ValueError:
            continue
        raise AssertionError(bad)
