"""Inputs that broke other servers, sent to the chat endpoint: calls, thoughts, sampling, forms and templates (10 to 21, 35, 47)."""

import json
import re
import time

import pytest

from atlas_core.text.template import ChatTemplate

USER = {"role": "user", "content": "hi"}
NAMES = ("get-weather", "time.now", "a__b", "x_1")
PARAMETERS = {"type": "object", "properties": {"minutes": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Server:
    """A server whose template and answer can be changed between requests."""

    def __init__(self, serve, kit):
        self.kit, self.text, self.chunk, self.ends = kit, "", 3, True
        self.engine = kit.engine(
            lambda request: kit.deltas(request, self.text, chunk=self.chunk, context=4096, ends=self.ends), context=4096
        )
        self._template = None
        model = kit.model(template=self, speech=kit.speech("", tools=("hermes",), reasoning=("think",)))
        self.running = serve(self.engine, served=model)

    def template(self, text):
        self._template = ChatTemplate(text, {}, strftime=lambda form: time.strftime(form, time.gmtime(86400)))

    def render(self, *arguments, **more):
        return self._template.render(*arguments, **more)

    def ask(self, **body):
        return self.running.chat(**body)

    def prompt(self, **body):
        response = self.ask(**body)
        assert response.status_code == 200, response.text
        return bytes(token for token in self.engine.requests[-1].prompt if token < 256).decode()


@pytest.fixture(scope="module")
def _server(serve_module, kit):
    return Server(serve_module, kit)


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture
def server(_server):
    _server.template(PLAIN)
    _server.text, _server.chunk, _server.ends = "ok", 3, True
    return _server


def joined(kit, response):
    """(content, reasoning, calls, finish reason) of a stream."""
    content, thought, calls, finish = "", "", [], None
    for event in kit.events(response.text)[:-1]:
        (choice,) = json.loads(event)["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        thought += delta.get("reasoning_content") or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls)
                calls.append([piece["id"], piece["function"]["name"], ""])
            calls[piece["index"]][2] += piece["function"].get("arguments", "")
        finish = choice["finish_reason"] or finish
    return content, thought, calls, finish


# 10


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_case_10_several_calls_keep_their_names(server, kit, chunk):
    server.text, server.chunk = "\n".join(call(name, minutes=number) for number, name in enumerate(NAMES)), chunk
    choice = server.ask(tools=TOOLS).json()["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert [one["function"]["name"] for one in calls] == list(NAMES)
    assert [json.loads(one["function"]["arguments"]) for one in calls] == [{"minutes": number} for number in range(4)]
    assert len({one["id"] for one in calls}) == 4
    _, _, streamed, finish = joined(kit, server.ask(tools=TOOLS, stream=True))
    assert finish == "tool_calls"
    assert [one[1] for one in streamed] == list(NAMES)
    assert len({one[0] for one in streamed}) == 4


def test_case_10_one_call_where_one_is_wanted(server, kit):
    server.text = call("a__b", minutes=1) + "\n" + call("x_1", minutes=2)
    choice = server.ask(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["a__b"]
    assert len(joined(kit, server.ask(tools=TOOLS, parallel_tool_calls=False, stream=True))[2]) == 1


# 11


@pytest.mark.parametrize("named", [False, True])
def test_case_11_a_call_that_is_cut_off(server, kit, named):
    server.text, server.ends = call("x_1", minutes=12345) + " " * 100, False
    more = {"tool_choice": {"type": "function", "function": {"name": "x_1"}}} if named else {}
    for limit in (12, 40, 55):
        choice = server.ask(tools=TOOLS, max_tokens=limit, **more).json()["choices"][0]
        content, _, calls, finish = joined(kit, server.ask(tools=TOOLS, max_tokens=limit, stream=True, **more))
        assert choice["finish_reason"] == finish == "length"
        assert "tool_call" not in (choice["message"]["content"] or "") + content
        written = [one["function"]["arguments"] for one in choice["message"].get("tool_calls", ())]
        assert written == [one[2] for one in calls]


def test_case_11_a_named_call_that_is_whole_ends_as_openai_says(server):
    server.text = call("x_1", minutes=1)
    named = {"type": "function", "function": {"name": "x_1"}}
    assert server.ask(tools=TOOLS, tool_choice=named).json()["choices"][0]["finish_reason"] == "stop"


# 14


OPENS = PLAIN + "{% if think is not defined or think %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"


def test_case_14_the_state_is_that_of_the_prompts_end(server, kit):
    server.template(OPENS)
    server.text = "so</think>\n\nYes."

    def both(**more):
        message = server.ask(**more).json()["choices"][0]["message"]
        content, thought, _, _ = joined(kit, server.ask(stream=True, **more))
        assert (message["content"] or "", message.get("reasoning_content", "")) == (content, thought)
        return content, thought

    assert both() == ("Yes.", "so")
    # Closed by a switch of the template's own, which nobody but the template knows.
    server.text = "The sum is 4."
    assert both(chat_template_kwargs={"think": False}) == ("The sum is 4.", "")
    # A mark earlier in the prompt does not count.
    marked = [{"role": "user", "content": "what is <think>?"}]
    assert both(messages=marked, chat_template_kwargs={"think": False}) == ("The sum is 4.", "")


def test_case_14_an_answer_that_ends_inside_its_thought(server, kit):
    server.template(OPENS)
    server.text = "I have to think about this for long"
    choice = server.ask(max_tokens=5).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert choice["message"]["reasoning_content"] == "I hav"
    assert joined(kit, server.ask(max_tokens=5, stream=True)) == ("", "I hav", [], "length")


# 17, 19, 21


@pytest.mark.parametrize(
    "body",
    [
        {"top_p": 0}, {"top_p": 1}, {"top_p": 1e-9}, {"top_k": 0}, {"top_k": -1}, {"top_k": 1}, {"top_k": 260}, {"top_k": 261},
        {"top_k": 2147483648}, {"min_p": 0}, {"min_p": 1}, {"temperature": 0}, {"temperature": 1e-7}, {"seed": -1},
        {"seed": 2**32 + 1}, {"seed": 2**63 - 1},
    ],
)  # fmt: skip
def test_case_17_edges_that_are_fine(server, body):
    assert server.ask(**body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"top_p": 1.5}, {"top_p": -0.1}, {"top_k": -2}, {"min_p": 1.1}, {"temperature": -1}, {"temperature": "NaN"},
        {"seed": 2**64}, {"seed": -(2**64)}, {"seed": "1"}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21},
    ],
)  # fmt: skip
def test_case_17_what_is_out_of_range_is_named(server, body):
    response = server.ask(**body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == list(body)[-1]


def test_case_21_logprobs(server, kit):
    server.text = kit.answer  # with a letter of three bytes, and one of four
    for more, count in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 5}, 5)):
        choice = server.ask(logprobs=True, **more).json()["choices"][0]
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(kit.answer.encode()) + 1
        assert {len(entry["top_logprobs"]) for entry in entries} == {count}
        data = b"".join(bytes(entry["bytes"]) for entry in entries if entry["bytes"] is not None)
        assert data.decode() == choice["message"]["content"] == kit.answer
        for entry in entries:
            values = [one["logprob"] for one in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
        streamed = [
            entry
            for event in kit.events(server.ask(logprobs=True, stream=True, **more).text)[:-1]
            for entry in (json.loads(event)["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == entries
    assert "Infinity" not in server.ask(logprobs=True, top_logprobs=5).text


# 35


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "https://example.org/s.json"}}}, "$ref"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a$"}}}, "pattern"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/nothing"}}}, "$ref"),
    ],
)
def test_case_35_what_cannot_be_enforced_is_refused(server, schema, keyword):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    response = server.ask(response_format=form)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith("response_format.json_schema.schema")
    assert keyword in error["message"]
    assert server.engine.requests == [] or not server.engine.requests[-1].grammar


# 47


ITEMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}>{% endfor %}{% endfor %}"
)


def history(arguments):
    one = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [one]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"town":"Graz"}', "<f town=Graz>"), ("", "<f>"), ({"town": "Graz"}, "<f town=Graz>")]
)
def test_case_47_arguments_as_text(server, arguments, shown):
    server.template(ITEMS)
    assert shown in server.prompt(messages=history(arguments))


@pytest.mark.parametrize("arguments", ["null", "[1]", "5", '"x"'])
def test_case_47_arguments_that_are_no_object(server, arguments):
    server.template(ITEMS)
    response = server.ask(messages=history(arguments))
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "messages[1].tool_calls[0].function.arguments",
    )


def test_case_47_the_clock_is_handed_in(server):
    server.template("{{ strftime_now('%Y-%m-%d') }}")
    assert server.prompt() == "1970-01-02"


def test_case_47_a_refusal_of_the_template_is_the_clients_mistake(server):
    server.template("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x")
    response = server.ask(messages=[{"role": "system", "content": "s"}, USER])
    assert response.status_code == 400
    assert "no system role" in response.json()["error"]["message"]


def test_case_47_empty_fields_are_as_none(server):
    server.template(ITEMS + "{% if tools %}TOOLS{% endif %}")
    bare = [USER, {"role": "assistant", "content": "a"}, USER]
    full = [USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER]
    assert server.prompt(messages=full, tools=[]) == server.prompt(messages=bare)
    null = [USER, {"role": "assistant", "content": None, "tool_calls": history("{}")[1]["tool_calls"]}]
    assert "None" not in server.prompt(messages=null)


def test_case_47_parts_are_joined_and_developers_are_system(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert re.match(
        r"\[system\]s\[user\]a\n?b",
        server.prompt(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]),
    )


def test_case_47_tools_are_plain_json(server):
    server.template("{{ tools | tojson }}")
    tool = {"type": "function", "function": {"name": "f", "description": "é < > & '", "parameters": PARAMETERS}}
    shown = server.prompt(tools=[tool])
    assert "é < > & '" in shown
    assert "\\u" not in shown
