"""``/v1/messages`` over HTTP: what goes into the prompt, what comes out streamed and whole, and how errors are told."""

import asyncio
import json
import socket
import time

import anthropic
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.contracts.dialect import Tool
from atlas_core.server.answer import Reading
from atlas_core.server.errors import anthropic_error
from atlas_core.server.messages.content import signature
from atlas_core.server.messages.face import Messages
from atlas_core.server.rates import Rates
from atlas_core.server.turn import Output, Prompt, Turn
from atlas_core.text.dialect.dialects import Hermes, Think
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.errors import AtlasError, EngineError, RequestError
from atlas_core.vocab.messages import Delta, Generate
from atlas_core.vocab.sampling import SamplingParams

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}|{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};"
    "{% endfor %}</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>\n"
    "{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "weather?"}
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Graz"}}\n</tool_call>'
NO_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'


@pytest.fixture
def server(serve, kit):
    """A server whose model answers with ``answer``."""

    def start(answer, *, chunk=3, ends=True, engine=None, template=TEMPLATE, **options):
        engine = engine or kit.engine(
            answer=lambda request: kit.deltas(request, answer, chunk=chunk, context=4096, ends=ends), context=4096
        )
        chat = ChatTemplate(template, {}, strftime=time.strftime)
        return serve(
            engine,
            served=kit.model(template=chat, speech=kit.speech("", tools=("hermes",), reasoning=("think",))),
            **options,
        )

    return start


def post(running, path="/v1/messages", **body):
    return running.http.post(path, json={"max_tokens": 1000, "messages": [USER], **body})


def told(running):
    return bytes(token for token in running.engine.requests[-1].prompt if token < 256).decode()


def events(response):
    """The events of a stream, each checked against its name and the API document."""
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def rebuilt(found):
    """The message that the events of a stream tell of; their order is checked."""
    assert found[0]["type"] == "message_start"
    message = found[0]["message"]
    opened = None
    for event in found[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert (opened, event["index"]) == (None, len(message["content"]))
                opened = event["index"]
                block = dict(event["content_block"])
                assert block.get("text", block.get("thinking", "")) == ""
                message["content"].append(block)
                written = ""
            case "content_block_delta":
                assert event["index"] == opened
                delta = event["delta"]
                kind = delta.pop("type")
                ((name, value),) = delta.items()
                block = message["content"][-1]
                match kind:
                    case "input_json_delta":
                        written += value
                    case "signature_delta":
                        block["signature"] = value
                    case _:
                        assert value
                        assert kind == f"{block['type']}_delta"
                        block[name] += value
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(written or "{}")
            case "message_delta":
                assert opened is None
                message |= event["delta"] | {"usage": event["usage"]}
            case other:
                assert other == "ping"
    assert found[-1] == {"type": "message_stop"}
    return message


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_thought_a_text_and_calls(server, chunk):
    thought = "I need it."
    running = server(f"<think>\n{thought}\n</think>\n\nLook:\n{CALL}\n{NO_CALL}\nand on", chunk=chunk)
    whole = post(running, tools=[TOOL]).json()
    found = post(running, tools=[TOOL], stream=True)
    assert found.headers["content-type"].startswith("text/event-stream")
    streamed = rebuilt(events(found))
    for event in events(found):
        running.documented.event("/v1/messages", event)
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        assert len({call.pop("id") for call in calls}) == 2
    assert streamed == whole
    assert whole["content"] == [
        {"type": "thinking", "thinking": thought, "signature": signature(thought)},
        {"type": "text", "text": "Look:"},
        {"type": "tool_use", "name": "get_weather", "input": {"town": "Graz"}},
        {"type": "tool_use", "name": "get_weather", "input": {}},
        {"type": "text", "text": "and on"},
    ]
    assert (whole["stop_reason"], whole["stop_sequence"], whole["model"]) == ("tool_use", None, "tiny")
    usage = whole["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (1, 0)
    assert usage["input_tokens"] == len(running.engine.requests[-1].prompt) - 1
    assert usage["output_tokens"] > 100


WORDS = [
    "<think>", "</think>", "\n", "ok é😀", "<tool_call>\n", '{"name": "f", "arguments": ', '{"a": [1, "é😀"]}', "[1]", "{", '"x', "}",
    "\n</tool_call>", "<", "a</t",
]  # fmt: skip


@given(words=st.lists(st.sampled_from(WORDS), max_size=12), data=st.data())
def test_streams_say_what_whole_answers_say(words, data):
    text = "".join(words).encode()
    finish = data.draw(st.sampled_from(["stop", "length"]))
    opening = data.draw(st.sampled_from(["open", "closed", "unsaid"]))
    stop = data.draw(st.sampled_from([None, "ok", "7"]))
    reading = Reading((Tool("f"),), Hermes.tools, Think.reasoning, data.draw(st.booleans()))
    turn = Turn(
        "id", 1, "m", "f", (Prompt((1, 2), opening=opening),), 1,
        (Generate("id-0", (1, 2), SamplingParams(max_tokens=data.draw(st.integers(1, 99)))),), reading=reading, stops=("ok",),
    )  # fmt: skip
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    writer, whole, stream = Messages().writer(turn), Output(), Output()
    sent, shown = writer.opening(), ""
    pieces = list(zip([0, *cuts], [*cuts, len(text)], strict=True))
    for number, (low, high) in enumerate(pieces):
        readable = text[:high].decode(errors="ignore")
        delta = Delta("id-0", tuple(text[low:high]), readable[len(shown) :], completion_tokens=high, prompt_tokens=2)
        if number == len(pieces) - 1:
            delta = delta._replace(finish=finish, stop=stop)
        shown = readable
        whole.add(delta)
        stream.count(delta)
        sent += writer.chunk(0, delta)
    sent += writer.closing([stream])

    class Response:
        text = sent.decode()

    wanted, found = Messages().whole(turn, [whole]), events(Response)
    for event in found:
        if (
            event["type"] == "content_block_delta"
            and event["delta"]["type"] == "input_json_delta"
            and finish == "length"
        ):
            break
    else:
        streamed = rebuilt(found)
        for message in (wanted, streamed):
            for block in message["content"]:
                block.pop("id", None)
        assert streamed == wanted
    assert wanted["stop_sequence"] == ("ok" if finish == "stop" and stop == "ok" else None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(server, stream):
    running = server(CALL, chunk=1)
    seen = set()
    for limit in range(1, len(CALL)):
        answer = post(running, tools=[TOOL], max_tokens=limit, stream=stream)
        if stream:
            found = events(answer)
            assert found[-2]["delta"]["stop_reason"] == "max_tokens"
            pieces = [
                event["delta"]["partial_json"]
                for event in found
                if event.get("delta", {}).get("type") == "input_json_delta"
            ]
            assert '{"town": "Graz"}'.startswith("".join(pieces))
            continue
        message = answer.json()
        assert message["stop_reason"] == "max_tokens"
        seen |= {json.dumps(block["input"]) for block in message["content"] if block["type"] == "tool_use"}
    assert stream or seen == {"{}", '{"town": "Graz"}'}


def test_why_it_ended(server, kit):
    running = server("one two five six", chunk=2)

    def ask(**more):
        found = post(running, **more).json()
        streamed = events(post(running, stream=True, **more))[-2]["delta"]
        ending = found["stop_reason"], found["stop_sequence"]
        assert (streamed["stop_reason"], streamed["stop_sequence"]) == ending
        return "".join(block["text"] for block in found["content"]), *ending

    assert ask() == ("one two five six", "end_turn", None)
    assert ask(stop_sequences=["five", "x"]) == ("one two ", "stop_sequence", "five")
    assert ask(stop_sequences=[str(kit.eos)]) == ("one two five six", "end_turn", None)
    assert ask(max_tokens=3) == ("one", "max_tokens", None)
    assert ask(max_tokens=9000, ignore_eos=True)[1] == "model_context_window_exceeded"
    assert ask(tools=[TOOL], tool_choice={"type": "any"})[1] == "end_turn"


def test_the_next_turn(server):
    running = server("Sunny.")
    history = [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "of another server"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Look:"}, {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"town": "<eos>"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "fog"}], "is_error": True},
            {"type": "text", "text": "And?"}]},
        {"role": "system", "content": "Be quick."},
    ]  # fmt: skip
    assert post(running, messages=history, system=[{"type": "text", "text": "S"}], tools=[TOOL]).status_code == 200
    assert told(running) == (
        "<tool>get_weather</tool>[system]S[user]weather?[assistant]<think>Hm.</think>Look:<tool_call>get_weather|town=<eos>;</tool_call>"
        "[tool]Error: fog[user]And?[system]Be quick.[assistant]"
    )
    assert all(token < 256 for token in running.engine.requests[-1].prompt)


def test_going_on_with_an_answer(server):
    running = server(" 42.")
    found = post(running, messages=[USER, {"role": "assistant", "content": "It is"}]).json()
    assert told(running).endswith("[assistant]It is")
    assert found["content"] == [{"type": "text", "text": " 42."}]


def test_thinking(server):
    running = server("so</think>\n\nYes.")
    found = post(running, thinking={"type": "enabled", "budget_tokens": 1024}).json()
    assert [block["type"] for block in found["content"]] == ["thinking", "text"]
    asked = running.engine.requests[-1].thinking
    assert (asked.budget, asked.opened) == (1024, True)
    post(running, thinking={"type": "adaptive"})
    assert running.engine.requests[-1].thinking.budget is None
    post(running, thinking={"type": "disabled"})
    assert told(running).endswith("[assistant]")


def test_forced_and_parallel_calls(server):
    running = server(f"{CALL}\n{CALL}")
    other = {"name": "other"}
    found = post(
        running,
        tools=[TOOL, other],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    )
    assert [block["type"] for block in found.json()["content"]] == ["tool_use"]
    assert found.json()["stop_reason"] == "tool_use"
    assert "other" not in told(running)
    assert "get_weather" in running.engine.requests[-1].grammar
    post(running, tools=[TOOL], tool_choice={"type": "none"})
    assert "<tool>" not in told(running)


def test_an_answer_of_a_given_form(server):
    running = server("{}")
    post(
        running,
        output_config={
            "format": {
                "type": "json_schema",
                "schema": {"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}},
            }
        },
    )
    assert running.engine.requests[-1].grammar != ""


def test_the_sdk_parses_an_answer_of_a_given_form(server):
    class Weather(pydantic.BaseModel):
        town: str
        degrees: list[int]

    running = server('{"town": "Graz", "degrees": [1, 2]}')
    with anthropic.Anthropic(base_url=running.url, api_key="k", max_retries=0) as client:
        found = client.messages.parse(model="tiny", max_tokens=99, messages=[USER], output_format=Weather)
        assert found.parsed_output == Weather(town="Graz", degrees=[1, 2])
    assert "degrees" in running.engine.requests[-1].grammar


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": "s", "tools": [TOOL]},
        {"thinking": {"type": "adaptive"}},
        {"messages": [USER, {"role": "assistant", "content": "It is"}]},
        {"messages": [USER, {"role": "assistant", "content": ""}, USER]},
        {"messages": [USER, {"role": "assistant", "content": []}, USER]},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
    ],
)
def test_the_count_is_that_of_the_answer(server, body):
    running = server("x")
    counted = post(running, "/v1/messages/count_tokens", **body)
    usage = post(running, **body).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_prompt_that_is_too_long(server, kit):
    running = server("x")
    body = {"messages": [{"role": "user", "content": "x" * 5000}]}
    refused = post(running, **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("prompt is too long: 50")
    assert "> 4095 maximum" in refused.json()["error"]["message"]
    assert post(running, "/v1/messages/count_tokens", **body).json()["input_tokens"] > 5000


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors(server, path):
    running = server("x", api_keys=("k",), max_body=2000, strict_model=True)
    key = {"x-api-key": "k"}

    def ask(headers, **send):
        found = running.http.post(path, headers=headers, **send)
        body = found.json()
        assert (body["type"], body["request_id"]) == ("error", found.headers["request-id"])
        return found.status_code, body["error"]["type"], body["error"].get("details", {}).get("error_code")

    asked = {"max_tokens": 5, "messages": [USER]}
    assert ask({}, json=asked) == (401, "authentication_error", "missing_api_key")
    assert ask({"authorization": "Bearer no"}, json=asked) == (401, "authentication_error", "invalid_api_key")
    assert ask(key, content="{") == (400, "invalid_request_error", "invalid_json")
    assert ask(key, json={"max_tokens": 5}) == (400, "invalid_request_error", "missing_field")
    assert ask(key, json={**asked, "model": "other"}) == (404, "not_found_error", "model_not_found")
    assert ask(key, json={**asked, "system": "x" * 3000}) == (413, "request_too_large", "body_too_large")
    assert running.http.get(path, headers=key).json()["error"]["type"] == "invalid_request_error"
    assert running.http.post(path, headers={**key, "x-request-id": "mine"}, json=asked).headers["request-id"] == "mine"


def test_a_path_that_does_not_exist_is_told_to_each_in_its_way(server):
    running = server("x")
    assert (
        running.http.get("/v1/messages/batches", headers={"anthropic-version": "2023-06-01"}).json()["type"] == "error"
    )
    assert "type" not in running.http.get("/v1/nothing").json()


def test_no_room(server, kit):
    running = server("", engine=kit.engine(slots=1, prefill=5.0), max_queue=0)
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as first:
        body = json.dumps({"max_tokens": 9, "messages": [USER]}).encode()
        first.sendall(
            b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        kit.until(lambda: running.engine.running == 1)
        refused = post(running, stream=True)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
    kit.until(lambda: running.engine.aborted and not running.engine.running, seconds=1)


def test_a_server_that_is_faulted(server):
    running = server("x")
    running.engine.state = "faulted"
    found = post(running)
    assert (found.status_code, found.json()["error"]["type"]) == (503, "api_error")
    assert found.headers["x-should-retry"] == "false"


def test_what_stands_before_the_endpoint_tells_errors_in_its_way_too(server):
    running = server("x", rates=Rates(requests=1))
    assert post(running).status_code == 200
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = post(running, path)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.json()["request_id"] == refused.headers["request-id"]
        assert int(refused.headers["retry-after"]) > 1


def test_a_server_that_is_loading(serve):
    async def long(on_progress):
        await asyncio.sleep(60)

    found = post(serve(bring_up=long, state="loading"))
    assert (found.status_code, found.json()["error"]["type"]) == (503, "overloaded_error")
    assert "retry-after" in found.headers


def test_a_stream_that_breaks_off(server, kit):
    running = server("", engine=kit.engine(answer=lambda request: kit.deltas(request)[:5]))
    found = events(post(running, stream=True))
    assert [found[0]["type"], found[-1]["type"]] == ["message_start", "error"]
    assert found[-1]["error"]["type"] == "api_error"
    running.documented.event("/v1/messages", found[-1])


def test_pings_while_the_prompt_is_computed(server, kit):
    running = server("", engine=kit.engine(prefill=0.5), ping_interval=0.1)
    found = events(post(running, stream=True))
    assert [event["type"] for event in found[:3]] == ["ping", "ping", "ping"]
    assert rebuilt([event for event in found if event["type"] != "ping"])["stop_reason"] == "end_turn"


def test_errors_have_anthropic_s_names():
    def named(error):
        return anthropic_error(error)["error"]["type"]

    assert named(EngineError("x", state="loading")) == named(EngineError("x", state="draining")) == "overloaded_error"
    assert named(RequestError("x", kind="not_implemented")) == "api_error"
    assert named(RequestError("x", kind="not_allowed")) == "invalid_request_error"
    assert named(AtlasError("x")) == "api_error"
