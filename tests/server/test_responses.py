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


def test_truncation_drops_the_oldest_turns(client):
    client.say("ok")
    history = [{"role": "developer", "content": "Rule."}]
    for number in range(20):
        history += [{"role": "user", "content": f"{number} " + "x" * 1000}, {"role": "assistant", "content": "y"}]
    refused = client.post(input=history)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.json()["error"]["param"] == "input"
    answer = client.post(input=history, truncation="auto")
    assert (answer.status_code, answer.json()["truncation"]) == (200, "auto")
    assert client.prompt.startswith("[system]Rule.[user]13 ")
    assert 7100 < answer.json()["usage"]["input_tokens"] < 8192
    assert client.post(input="x" * 9000, truncation="auto").json()["error"]["code"] == "context_length_exceeded"


def test_an_answer_that_is_cut_off(client, sdk):
    client.say("<think>\nlong long long")
    found = sdk.responses.create(model="tiny", input="hi", max_output_tokens=12)
    assert (found.status, found.incomplete_details.reason, found.output_text) == ("incomplete", "max_output_tokens", "")
    (thought,) = found.output
    assert (thought.type, thought.status, thought.content[0].text) == ("reasoning", "incomplete", "long")
    text = call("get_weather", town="Graz")
    client.say(text)
    events = stream_of(client, tools=[TOOL], max_output_tokens=text.index("az"))
    assert events[-1]["type"] == "response.incomplete"
    (cut,) = events[-1]["response"]["output"]
    assert (cut["type"], cut["status"], cut["arguments"]) == ("function_call", "incomplete", '{"town": "Gr')
    # Nobody can have run it, so that it is not in the way.
    client.say("So?")
    answer = client.post(previous_response_id=events[-1]["response"]["id"], input="again")
    assert (answer.status_code, client.prompt) == (200, "[user]hi[user]again[assistant]")


def test_a_thought_as_summary(client):
    client.say("<think>\nHm, hm.\n</think>\n\nYes.")
    events = stream_of(client, reasoning={"summary": "auto", "effort": "high"})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in dict.fromkeys(kinds) if "reasoning" in kind] == [
        "reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done", "reasoning_summary_part.done"
    ]  # fmt: skip
    (thought, _) = events[-1]["response"]["output"]
    assert (thought["summary"], thought.get("content")) == ([{"type": "summary_text", "text": "Hm, hm."}], None)
    assert events[-1]["response"]["reasoning"] == {"effort": "high", "summary": "auto"}


def test_what_the_template_is_told(client):
    client.say("Yes.")
    client.post(reasoning={"effort": "none"}, text={"verbosity": "low"})
    assert client.prompt == "[user]hi(low)[assistant]!"


def test_logprobs(client, sdk):
    client.say("<think>\nHm.\n</think>\n\nYes.")
    asked = {"model": "tiny", "input": "hi", "include": ["message.output_text.logprobs"]}
    whole = sdk.responses.create(**asked, top_logprobs=2)
    entries = whole.output[1].content[0].logprobs
    assert "".join(entry.token for entry in entries) == "Yes."
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 4
    events = list(sdk.responses.create(**asked, stream=True))
    told = [entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert "".join(told) == "Yes."
    assert sdk.responses.create(model="tiny", input="hi").output[1].content[0].logprobs == []


def test_sampling_is_as_asked(client):
    client.say("Yes.")
    client.post(
        temperature=0.25, top_p=0.5, top_k=7, seed=3, stop=["zz"], min_p=0.1, presence_penalty=0.5, max_output_tokens=9
    )
    found = client.engine.requests[-1].sampling
    assert (found.temperature, found.top_p, found.top_k, found.seed, found.min_p, found.max_tokens) == (
        0.25,
        0.5,
        7,
        3,
        0.1,
        9,
    )
    assert (found.presence_penalty, found.stop) == (0.5, ("zz",))


def test_the_fields_of_codex_are_taken_in_silence(client, caplog):
    client.say("Yes.")
    events = stream_of(
        client, client_metadata={"a": "b"}, include=["reasoning.encrypted_content"], input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        instructions="Be.", model="other", parallel_tool_calls=False, prompt_cache_key="k", reasoning={"effort": "medium", "summary": "auto"},
        store=False, tool_choice="auto", tools=[TOOL],
    )  # fmt: skip
    assert events[-1]["type"] == "response.completed"
    assert (events[-1]["response"]["parallel_tool_calls"], events[-1]["response"]["store"]) == (False, False)
    assert [record for record in caplog.records if record.levelname != "INFO" and record.name.startswith("atlas")] == []


def test_what_nobody_here_can_run_is_left_out(client, caplog):
    client.say("Yes.")
    tools = [{"type": kind} for kind in ("web_search", "image_generation", "local_shell", "mcp")] + [
        {"type": "namespace", "name": "n", "tools": []}
    ]
    for _ in range(2):
        answer = client.post(
            tools=tools, input=[{"type": "web_search_call", "id": "ws_1"}, {"role": "user", "content": "hi"}]
        )
        assert (answer.status_code, client.prompt) == (200, "[user]hi[assistant]")
    told = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(told) == len(set(told)) == 5
    client.post(
        tools=[*tools, TOOL],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}, {"type": "mcp"}],
        },
    )
    assert client.prompt.startswith("<tool>get_weather: ")
    assert "tool_call" in client.engine.requests[-1].grammar


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": []}, "input", "missing_field"),
        ({"input": 5}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}]}, "input[0].content[0]", "unsupported_content"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id", "invalid_value"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "previous_response_not_found"),
        ({"conversation": {"x": 1}}, "conversation", "invalid_value"),
        ({"conversation": ""}, "conversation", "invalid_value"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "none"}, "tools": [TOOL]}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "invalid_value"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value"),
        ({"truncation": "some"}, "truncation", "invalid_value"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(client, body, param, code):
    client.say("Yes.")
    for stream in (False, True):
        answer = client.post(stream=stream, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    if not {"background", "max_output_tokens", "top_logprobs", "metadata", "temperature"} & body.keys():
        counted = client.http.post("/v1/responses/input_tokens", json={"input": "hi"} | body)
        assert (counted.status_code, counted.json()["error"]["param"]) == (400, param)


def test_a_schema_that_cannot_be_enforced_is_named(client):
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}}
    error = client.post(text={"format": form}).json()["error"]
    assert error["param"].startswith("text.format.schema")
    assert "uniqueItems" in error["message"]


def test_json_on_demand(client):
    client.say("{}")
    assert client.post(text={"format": {"type": "json_object"}}).json()["text"]["format"] == {"type": "json_object"}
    assert client.engine.requests[-1].grammar


def test_a_stream_that_breaks_off(client, sdk):
    client.say("A long answer.", chunk=2)
    whole = client.engine.answer
    client.engine.answer = lambda request: whole(request)[:3]
    try:
        events = list(sdk.responses.create(model="tiny", input="hi", stream=True))
        failed = client.post(input="hi")
    finally:
        client.engine.answer = whole
    assert (events[-1].type, events[-1].response.status, events[-1].response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert "ended the request early" in events[-1].response.error.message
    assert sdk.responses.retrieve(events[-1].response.id).status == "failed"
    assert failed.status_code >= 500
    refused = client.post(previous_response_id=events[-1].response.id)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
