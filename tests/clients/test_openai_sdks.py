"""Clients of the chat endpoint, each in an exchange of several turns with a tool, streamed and not."""

import json
import sys
import time
from pathlib import Path

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from scripted_model import turn

TOWN = {"town": 'Gräz "2"\n'}
SCRIPTS = {
    "weather": [
        turn("Let me look.", thought="A tool knows.", calls=[("get_weather", TOWN), ("get_weather", {"town": "Wien"})]),
        turn("Sunny, ☀ both.", thought="So."),
    ]
}
ASK = "play weather"
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
}


@pytest.fixture(scope="module")
def server(play):
    return play(SCRIPTS)


def told(server):
    """What the model was told last: roles, and the results of tools."""
    messages = server.conversations[-1]["messages"]
    return [m["role"] for m in messages], [m["content"] for m in messages if m["role"] == "tool"]


@pytest.mark.parametrize("stream", [False, True])
def test_openai(server, stream):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:

        def ask(messages):
            if not stream:
                return client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
            with client.chat.completions.stream(model="scripted", messages=messages, tools=[TOOL]) as events:
                return events.get_final_completion()

        messages = [{"role": "user", "content": ASK}]
        (choice,) = ask(messages).choices
        calls = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        assert [json.loads(call.function.arguments) for call in calls] == [TOWN, {"town": "Wien"}]
        messages.append(choice.message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": f"sun {n}"} for n, call in enumerate(calls)]
        (choice,) = ask(messages).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", "Sunny, ☀ both.")
    assert told(server) == (["user", "assistant", "tool", "tool"], ["sun 0", "sun 1"])
    before = server.conversations[-1]["messages"][1]
    assert before["reasoning_content"] == "A tool knows."
    assert [call["function"]["arguments"] for call in before["tool_calls"]] == [TOWN, {"town": "Wien"}]


def until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def invoked(chat, messages, *, stream):
    if not stream:
        return chat.invoke(messages)
    first, *rest = chat.stream(messages)
    for chunk in rest:
        first += chunk
    return first


@tool
def get_weather(town: str) -> str:
    """The weather."""
    return f"sun in {town}"


@pytest.mark.parametrize("stream", [False, True])
def test_langchain(server, stream):
    chat = ChatOpenAI(model="scripted", base_url=f"{server.url}/v1", api_key="k", max_retries=0).bind_tools(
        [get_weather]
    )

    messages = [HumanMessage(ASK)]
    messages.append(invoked(chat, messages, stream=stream))
    calls = messages[-1].tool_calls
    assert [(call["name"], call["args"]) for call in calls] == [
        ("get_weather", TOWN),
        ("get_weather", {"town": "Wien"}),
    ]
    messages += [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in calls]
    final = invoked(chat, messages, stream=stream)
    assert (final.text, final.tool_calls) == ("Sunny, ☀ both.", [])
    assert told(server) == (["user", "assistant", "tool", "tool"], [f"sun in {TOWN['town']}", "sun in Wien"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_langchain_of_responses(server, stream, stored):
    chat = ChatOpenAI(
        model="scripted", base_url=f"{server.url}/v1", api_key="k", max_retries=0, use_responses_api=True,
        use_previous_response_id=stored, store=stored, include=["reasoning.encrypted_content"],
    ).bind_tools([get_weather])  # fmt: skip
    before = len(server.requests)
    messages = [HumanMessage(ASK)]
    messages.append(invoked(chat, messages, stream=stream))
    calls = messages[-1].tool_calls
    assert [call["args"] for call in calls] == [TOWN, {"town": "Wien"}]
    assert messages[-1].text == "Let me look."
    messages += [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in calls]
    final = invoked(chat, messages, stream=stream)
    assert (final.text, final.tool_calls) == ("Sunny, ☀ both.", [])
    assert told(server) == (["user", "assistant", "tool", "tool"], [f"sun in {TOWN['town']}", "sun in Wien"])
    assert server.conversations[-1]["messages"][1]["reasoning_content"] == "A tool knows."
    # A request is written down when its answer is done, which may be after the client has it.
    until(lambda: len(server.requests) == before + 2)
    assert ("previous_response_id" in json.loads(server.requests[-1][3])) == stored


FUNCTIONS = '''
def get_weather(town: str) -> str:
    """The weather."""
    return "sun in " + town
'''


@pytest.mark.parametrize("mode", [(), ("--no-stream",)])
def test_llm(server, run_client, mode):
    settings = run_client.home / "llm"
    settings.mkdir()
    entry = {"model_id": "atlas", "model_name": "scripted", "api_base": f"{server.url}/v1", "supports_tools": True}
    (settings / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    llm = str(Path(sys.executable).with_name("llm"))
    said = run_client(
        llm,
        "-m",
        "atlas",
        "--no-log",
        "--functions",
        FUNCTIONS,
        *mode,
        ASK,
        LLM_USER_PATH=str(settings),
        OPENAI_API_KEY="k",
    )
    assert "Let me look." in said
    assert said.endswith("Sunny, ☀ both.\n")
    assert told(server) == (["user", "assistant", "tool", "tool"], [f"sun in {TOWN['town']}", "sun in Wien"])
