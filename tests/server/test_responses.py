"""The responses face over HTTP and through its SDK: what goes into the prompt, what comes out, streamed and whole."""

import json
import time

import openai
import pydantic
import pytest

from atlas_core.text.template import ChatTemplate

TEMPLATE = (
    "{% if tools %}{% for t in tools %}<tool>{{ t.function.name }}: {{ t.function.parameters | tojson }}</tool>\n{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}|{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};"
    "{% endfor %}</tool_call>{% endfor %}\n{% endfor %}{% if verbosity %}({{ verbosity }}){% endif %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}!{% endif %}{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string"}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": PARAMETERS,
    "strict": True,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches."}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Client:
    """A server whose model answers with ``answers``, one after the other, and an SDK that speaks to it."""

    def __init__(self, serve, kit):
        self.answers = []
        self.chunk, self.ends = 3, True
        self.engine = kit.engine(answer=self._answer, context=8192)
        template = ChatTemplate(TEMPLATE, {}, strftime=time.strftime)
        speech = kit.speech("", tools=("hermes",), reasoning=("think",))
        self.server = serve(self.engine, served=kit.model(template=template, speech=speech))
        self.http = self.server.http
        self._deltas = kit.deltas

    def _answer(self, request):
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return self._deltas(request, text, chunk=self.chunk, context=8192, ends=self.ends)

    def sdk(self, key="k"):
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0)

    def say(self, *answers, chunk=3, ends=True):
        self.answers[:] = answers
        self.chunk, self.ends = chunk, ends
        return self

    def post(self, **body):
        return self.http.post("/v1/responses", json={"input": "hi"} | body)

    @property
    def prompt(self):
        return bytes(token for token in self.engine.requests[-1].prompt if token < 256).decode()


@pytest.fixture(scope="module")
def client(serve_module, kit):
    return Client(serve_module, kit)


@pytest.fixture(scope="module")
def sdk(client):
    with client.sdk() as sdk:
        yield sdk


def stream_of(client, **body):
    """(type, data) of every event of a stream, checked for their form."""
    text = client.post(stream=True, **body).text
    found = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        client.server.documented.event("/v1/responses", event)
        found.append(event)
    return found


def test_a_whole_answer(client, sdk, kit):
    client.say(f"<think>\nHm.\n</think>\n\n{kit.answer}")
    found = sdk.responses.create(
        model="tiny", input="hi", instructions="Be kind.", metadata={"a": "b"}, max_output_tokens=100, temperature=0.5
    )
    assert client.prompt == "[system]Be kind.[user]hi[assistant]"
    assert (found.status, found.output_text, found.model, found.object) == ("completed", kit.answer, "tiny", "response")
    assert (found.instructions, found.metadata, found.max_output_tokens, found.temperature) == (
        "Be kind.",
        {"a": "b"},
        100,
        0.5,
    )
    thought, message = found.output
    assert (thought.type, thought.content[0].text, thought.summary, thought.encrypted_content) == (
        "reasoning",
        "Hm.",
        [],
        None,
    )
    assert (message.role, message.status, message.content[0].annotations) == ("assistant", "completed", [])
    assert [item.id.split("_")[0] for item in found.output] == ["rs", "msg"]
    assert found.usage.input_tokens == len(client.prompt)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert (found.usage.input_tokens_details.cached_tokens, found.error, found.incomplete_details) == (1, None, None)
    assert found.created_at <= found.completed_at <= time.time() + 1


def test_a_stream_tells_what_the_whole_answer_says(client):
    calls = call("get_weather", town="Graz") + call("apply_patch", input='a\n"b"')
    client.say(f"<think>\nHm.\n</think>\n\nLook:\n{calls}", chunk=5)
    events = stream_of(client, tools=[TOOL, PATCH])
    kinds = [event["type"].removeprefix("response.") for event in events]
    runs = [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]]
    assert runs == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert kinds.count("function_call_arguments.delta") > 1
    whole = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert [event["item"]["id"] for event in events if event["type"].endswith("item.added")] == [
        item["id"] for item in done
    ]
    assert [event["output_index"] for event in events if event["type"].endswith("item.added")] == [0, 1, 2, 3]
    function, custom = whole["output"][2:]
    assert (function["name"], json.loads(function["arguments"])) == ("get_weather", {"town": "Graz"})
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", 'a\n"b"')
    assert events[0]["response"] == events[1]["response"] == whole | {
        "status": "in_progress", "completed_at": None, "output": [], "usage": None
    }  # fmt: skip


class Weather(pydantic.BaseModel):
    town: str


def test_the_sdk_parses_streams(client, sdk):
    client.say(f"Look: {call('get_weather', town='Graz')}")
    with sdk.responses.stream(model="tiny", input="hi", tools=[TOOL]) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert "".join(deltas) == final.output_text == "Look:"
    assert json.loads(final.output[1].arguments) == {"town": "Graz"}
    client.say('{"town": "Wien"}')
    parsed = sdk.responses.parse(model="tiny", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(town="Wien")
    assert "town" in client.engine.requests[-1].grammar


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_an_exchange_of_several_turns(client, sdk, stream, stored):
    client.say(
        f"<think>\nA tool.\n</think>\n\n{call('get_weather', town='Graz')}\n{call('apply_patch', input='+x')}", "Sunny."
    )

    def ask(**body):
        if not stream:
            return sdk.responses.create(model="tiny", tools=[TOOL, PATCH], store=stored, **body)
        events = list(sdk.responses.create(model="tiny", tools=[TOOL, PATCH], store=stored, stream=True, **body))
        return events[-1].response

    first = ask(input="weather?", include=["reasoning.encrypted_content"])
    function, custom = first.output[1:]
    outputs = [
        {"type": "function_call_output", "call_id": function.call_id, "output": "sun <eos>"},
        {
            "type": "custom_tool_call_output",
            "call_id": custom.call_id,
            "output": [{"type": "input_text", "text": "done"}],
        },
    ]
    if stored:
        second = ask(previous_response_id=first.id, input=outputs)
    else:
        history = [item.model_dump(exclude_none=True) for item in first.output]
        del history[0]["content"]  # as Codex does: the sealed thought has to do
        second = ask(input=[{"role": "user", "content": "weather?"}, *history, *outputs])
    assert second.output_text == "Sunny."
    assert client.prompt.split("\n", 2)[2] == (
        "[user]weather?[assistant]<think>A tool.</think><tool_call>get_weather|town=Graz;</tool_call>"
        "<tool_call>apply_patch|input=+x;</tool_call>[tool]sun <eos>[tool]done[assistant]"
    )
