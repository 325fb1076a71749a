"""Clients of the messages endpoint, each in an exchange of several turns with a tool, streamed and not."""

import anthropic
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from scripted_model import turn

TOWN = {"town": 'Gräz "2"\n'}
SCRIPTS = {
    "weather": [
        turn("Let me look.", thought="A tool knows.", calls=[("get_weather", TOWN), ("get_weather", {"town": "Wien"})]),
        turn("Sunny, ☀ both.", thought="So."),
    ],
    "count": [turn("one two three four five six")],
}
ASK = "play weather"
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
NAMED = {"model": "scripted", "max_tokens": 1000}


@pytest.fixture(scope="module")
def server(play):
    return play(SCRIPTS, api_keys=("k",))


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        yield client


def told(server):
    """What the model was told last: roles, and the results of tools."""
    messages = server.conversations[-1]["messages"]
    return [m["role"] for m in messages], [m["content"] for m in messages if m["role"] == "tool"]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(server, client, stream):
    def ask(messages):
        asked = {
            **NAMED,
            "messages": messages,
            "tools": [TOOL],
            "system": "Be brief.",
            "thinking": {"type": "adaptive"},
        }
        counted = client.messages.count_tokens(**{name: asked[name] for name in asked if name != "max_tokens"})
        if stream:
            with client.messages.stream(**asked) as events:
                found = events.get_final_message()
        else:
            found = client.messages.create(**asked)
        assert found.usage.input_tokens + found.usage.cache_read_input_tokens == counted.input_tokens
        return found

    messages = [{"role": "user", "content": ASK}]
    first = ask(messages)
    thought, text, *calls = first.content
    assert (first.stop_reason, first.role, first.id[:4]) == ("tool_use", "assistant", "msg_")
    assert (thought.thinking, text.text) == ("A tool knows.", "Let me look.")
    assert [(call.name, call.input) for call in calls] == [("get_weather", TOWN), ("get_weather", {"town": "Wien"})]
    assert first.usage.output_tokens > first.usage.output_tokens_details.thinking_tokens > 0
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"sun {n}"} for n, call in enumerate(calls)]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = ask(messages)
    assert (second.stop_reason, second.content[-1].text) == ("end_turn", "Sunny, ☀ both.")
    assert told(server) == (["system", "user", "assistant", "tool", "tool"], ["sun 0", "sun 1"])
    before = server.conversations[-1]["messages"][2]
    assert (before["content"], before["reasoning_content"]) == ("Let me look.", "A tool knows.")
    assert [call["function"]["arguments"] for call in before["tool_calls"]] == [TOWN, {"town": "Wien"}]


def test_the_tool_runner(server, client):
    @anthropic.beta_tool
    def get_weather(town: str) -> str:
        """The weather."""
        return f"sun in {town}"

    runner = client.beta.messages.tool_runner(**NAMED, messages=[{"role": "user", "content": ASK}], tools=[get_weather])
    assert runner.until_done().content[-1].text == "Sunny, ☀ both."
    assert told(server)[1] == [f"sun in {TOWN['town']}", "sun in Wien"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_and_limits(client, stream):
    def ask(**more):
        asked = {**NAMED, "messages": [{"role": "user", "content": "play count"}], **more}
        if not stream:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            return events.get_final_message()

    found = ask(stop_sequences=["none", "five"])
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == (
        "stop_sequence",
        "five",
        "one two three four ",
    )
    found = ask(max_tokens=7)
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == ("max_tokens", None, "one two")


def test_errors(server, client):
    for change, kind, words in (
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, anthropic.BadRequestError, "messages[0].role"),
    ):
        with pytest.raises(kind, match=words.replace("[", r"\[")) as caught:
            client.messages.create(**{**NAMED, "messages": [{"role": "user", "content": "x"}], **change})
        assert caught.value.type == "invalid_request_error"
        assert caught.value.request_id.startswith("req_")
    with (
        anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        stranger.messages.create(**NAMED, messages=[{"role": "user", "content": "x"}])
    assert (caught.value.type, caught.value.request_id[:4]) == ("authentication_error", "req_")
    with pytest.raises(anthropic.InternalServerError) as caught:
        client.messages.batches.list()
    assert (caught.value.status_code, caught.value.error_code) == (501, "not_implemented")


@tool
def get_weather(town: str) -> str:
    """The weather."""
    return f"sun in {town}"


@pytest.mark.parametrize("stream", [False, True])
def test_langchain(server, stream):
    chat = ChatAnthropic(model="scripted", base_url=server.url, api_key="k", max_retries=0).bind_tools([get_weather])

    def ask(messages):
        if not stream:
            return chat.invoke(messages)
        first, *rest = chat.stream(messages)
        for chunk in rest:
            first += chunk
        return first

    messages = [HumanMessage(ASK)]
    messages.append(ask(messages))
    calls = messages[-1].tool_calls
    assert [(call["name"], call["args"]) for call in calls] == [
        ("get_weather", TOWN),
        ("get_weather", {"town": "Wien"}),
    ]
    messages += [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in calls]
    final = ask(messages)
    assert (final.text, final.tool_calls) == ("Sunny, ☀ both.", [])
    assert told(server) == (["user", "assistant", "tool", "tool"], [f"sun in {TOWN['town']}", "sun in Wien"])
