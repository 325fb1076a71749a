"""Tools and thoughts over HTTP: what goes into the prompt, and what comes out, streamed and whole."""

import json
import time

import openai
import pytest

from atlas_core.text.template import ChatTemplate

TEMPLATE = (
    "{% if tools %}{% for t in tools %}<tool>{{ t.function.name }}: {{ t.function.parameters | tojson }}</tool>\n{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}|{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};"
    "{% endfor %}</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>\n"
    "{% endif %}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": '<eos> & "x"',
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}, "required": ["town"]},
    },
}  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Graz", "days": 2}}\n</tool_call>'
ARGUMENTS = {"town": "Graz", "days": 2}
USER = {"role": "user", "content": "weather?"}


@pytest.fixture
def server(serve, kit):
    """A server whose model answers with ``answers``, one after the other."""

    def start(*answers, dialect="hermes", ends=True, chunk=3, options=None, **changes):
        queue = list(answers)
        engine = kit.engine(
            answer=lambda request: kit.deltas(
                request, queue.pop(0) if len(queue) > 1 else queue[0], chunk=chunk, context=4096, ends=ends
            ),
            context=4096,
        )  # fmt: skip
        template = ChatTemplate(TEMPLATE, {}, strftime=time.strftime)
        speech = kit.speech("", tools=(dialect,), reasoning=("think",))
        return serve(engine, served=kit.model(template=template, speech=speech, **changes), **(options or {}))

    return start


@pytest.fixture
def sdk():
    def connect(server):
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)

    return connect


def prompt(server, number=-1):
    return bytes(token for token in server.engine.requests[number].prompt if token < 256).decode()


def collect(stream):
    """(content, reasoning, calls, finish reason) of a stream, as clients put it together."""
    content, reasoning, calls, finish = "", "", {}, None
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index not in calls
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_an_exchange_of_several_turns(server, sdk, chunk):
    running = server("<think>I need the tool.</think>\n\n" + CALL, "Sunny in Graz.", chunk=chunk)
    client = sdk(running)
    first = client.chat.completions.create(model="tiny", messages=[USER], tools=[TOOL])
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.reasoning_content == "I need the tool."
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments), call.type) == (
        "get_weather",
        ARGUMENTS,
        "function",
    )
    assert call.id.startswith("call_")
    history = [
        USER,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sun <eos>"},
    ]
    second = client.chat.completions.create(model="tiny", messages=history, tools=[TOOL])
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Sunny in Graz.", "stop")
    assert prompt(running).startswith("<tool>get_weather: {")
    assert (
        "[assistant]<think>I need the tool.</think><tool_call>get_weather|town=Graz;days=2;</tool_call>[tool]sun <eos>"
        in prompt(running)
    )


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_same_exchange_streamed(server, sdk, chunk):
    running = server(f"<think>\nHm.\n</think>\n\nLook:\n{CALL}\n{CALL}", "Sunny.", chunk=chunk)
    client = sdk(running)
    content, reasoning, calls, finish = collect(
        client.chat.completions.create(model="tiny", messages=[USER], tools=[TOOL], stream=True)
    )
    assert (content, reasoning, finish) == ("Look:", "Hm.", "tool_calls")
    assert [calls[index][1] for index in (0, 1)] == ["get_weather"] * 2
    assert [json.loads(calls[index][2]) for index in (0, 1)] == [ARGUMENTS] * 2
    assert calls[0][0] != calls[1][0]
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Sunny."


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(server, sdk, stream):
    client = sdk(server(CALL + " and more", chunk=1))
    for limit in range(1, len(CALL)):
        answer = client.chat.completions.create(
            model="tiny", messages=[USER], tools=[TOOL], stream=stream, max_tokens=limit
        )
        if stream:
            content, _, calls, finish = collect(answer)
            written = [call[2] for call in calls.values()]
        else:
            choice = answer.choices[0]
            content, finish = choice.message.content or "", choice.finish_reason
            written = [call.function.arguments for call in choice.message.tool_calls or ()]
        assert finish == "length"
        assert content in ("", "<", "<t")
        assert all('{"town": "Graz", "days": 2}'.startswith(text) for text in written)


def test_parallel_calls_may_be_refused(server):
    running = server(f"{CALL}\n{CALL}")
    body = {"messages": [USER], "tools": [TOOL]}
    assert len(running.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]) == 2
    message = running.http.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False}).json()["choices"][
        0
    ]["message"]
    assert len(message["tool_calls"]) == 1


def test_tool_choice(server):
    running = server(CALL)
    other = {"type": "function", "function": {"name": "other"}}
    body = {"messages": [USER], "tools": [TOOL, other]}

    def ask(choice):
        response = running.http.post("/v1/chat/completions", json={**body, "tool_choice": choice})
        return response.json(), prompt(running), running.engine.requests[-1].grammar

    answer, text, grammar = ask("none")
    assert answer["choices"][0]["message"]["content"] == CALL
    assert ("<tool>" in text, grammar) == (False, "")
    answer, text, grammar = ask("auto")
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert ("other" in text, grammar) == (True, "")
    answer, _, grammar = ask("required")
    assert "call_1" in grammar
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    answer, text, grammar = ask({"type": "function", "function": {"name": "get_weather"}})
    assert ("other" in text, "call_1" in grammar, "call_0" in grammar) == (False, False, True)
    assert answer["choices"][0]["finish_reason"] == "stop"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [other]}}
    _, text, grammar = ask(allowed)
    assert ("get_weather" in text.partition("[user]")[0], "call_0" in grammar) == (False, True)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[1].tool_calls[0].function.name"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "reasoning": 5}]}, "messages[1].reasoning"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"regex": "(a"}, "regex"), ({"regex": " "}, "regex"), ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"json_schema": {}, "regex": "a"}, "json_schema"), ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"ebnf": "root ::= x"}, "ebnf"), ({"grammar": "root ::= x"}, "grammar"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(server, body, field):
    response = server("x").http.post("/v1/chat/completions", json={"messages": [USER], **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


def test_a_syntax_without_a_grammar_refuses_to_force(server):
    running = server(CALL, dialect="glm4")
    for more, field in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        response = running.http.post("/v1/chat/completions", json={"messages": [USER], "tools": [TOOL], **more})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert "glm4" in response.json()["error"]["message"]


def test_a_model_that_calls_no_tools(server):
    response = server("x", dialect="plain").http.post(
        "/v1/chat/completions", json={"messages": [USER], "tools": [TOOL]}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_ids_as_the_template_wants_them(server):
    running = server('[TOOL_CALLS]get_weather[ARGS]{"town": "Graz", "days": 2}', dialect="mistral")
    answer = running.http.post("/v1/chat/completions", json={"messages": [USER], "tools": [TOOL]}).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


@pytest.mark.parametrize("stream", [False, True])
def test_the_state_is_that_of_the_prompts_end(server, sdk, stream):
    client = sdk(server("so</think>\n\nYes."))

    def ask(**more):
        answer = client.chat.completions.create(model="tiny", messages=[USER], stream=stream, **more)
        if stream:
            return collect(answer)[:2]
        message = answer.choices[0].message
        return message.content, getattr(message, "reasoning_content", None) or ""

    opened = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    assert ask(**opened) == ("Yes.", "so")
    assert ask() == ("so</think>\n\nYes.", "")
    content, thought = ask(max_tokens=2, **opened)
    assert (content or None, thought) == (None, "so")


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content", "reasoning")])
def test_thoughts_under_the_names_that_the_operator_chose(server, kit, names):
    running = server("so</think>\n\nYes.", options={"reasoning_names": names})
    body = {"messages": [USER], "enable_thinking": True}
    message = running.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert {name: text for name, text in message.items() if "reasoning" in name} == dict.fromkeys(names, "so")
    stream = kit.events(running.http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    deltas = [json.loads(payload)["choices"][0]["delta"] for payload in stream[:-1]]
    assert {name for delta in deltas for name in delta if "reasoning" in name} == set(names)
    assert ["".join(delta.get(name, "") for delta in deltas) for name in names] == ["so"] * len(names)


def test_a_thought_is_asked_for_and_forbidden_by_the_names_of_other_servers(server):
    running = server("x")
    for body in ({"enable_thinking": True}, {"thinking": {"type": "enabled", "budget_tokens": 5}}):
        running.http.post("/v1/chat/completions", json={"messages": [USER], **body})
        assert prompt(running).endswith("[assistant]<think>\n")
    assert running.engine.requests[-1].thinking.budget == 5
    on = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}}
    for body in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"reasoning": {"effort": "none"}}):
        running.http.post("/v1/chat/completions", json={**on, **body})
        assert prompt(running).endswith("[assistant]")


def test_the_engine_is_told_about_thoughts(server):
    running = server("x", thinking_budget=7)
    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}}
    running.http.post("/v1/chat/completions", json=body)
    thinking = running.engine.requests[-1].thinking
    assert (thinking.start, thinking.end, thinking.opened, thinking.budget) == ("<think>", "</think>", True, 7)
    assert bytes(thinking.end_ids) == b"</think>"
    running.http.post("/v1/chat/completions", json={**body, "thinking_token_budget": 3})
    assert running.engine.requests[-1].thinking.budget == 3
    efforts = {"minimal": 1, "low": 3, "medium": 7, "high": 14, "xhigh": 28, "max": 28}
    for effort, budget in efforts.items():
        running.http.post("/v1/chat/completions", json={**body, "reasoning_effort": effort})
        assert running.engine.requests[-1].thinking.budget == budget
    running.http.post("/v1/chat/completions", json={**body, "reasoning_effort": "high", "thinking_token_budget": 9})
    assert running.engine.requests[-1].thinking.budget == 9
    for off in ({"thinking_token_budget": 0}, {"reasoning_effort": "none"}):
        running.http.post("/v1/chat/completions", json={"messages": [USER], **off})
        assert prompt(running).endswith("[assistant]")


def test_thinking_can_be_switched_off_whatever_the_template_does(serve, kit):
    template = ChatTemplate("{{ messages[0].content }}<think>{{ '\\n' }}", {}, strftime=time.strftime)
    running = serve(served=kit.model(template=template, speech=kit.speech("<think>"), thinking=False))
    body = running.chat().json()
    assert prompt(running) == "hi<think>\n\n</think>\n\n"
    assert body["choices"][0]["message"]["content"] == kit.answer
    assert running.engine.requests[-1].thinking is None


def test_user_text_in_tools_and_results_is_no_control_token(server, kit):
    running = server("x")
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning": "<eos>", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town": "<eos>"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "<eos>"}]},
    ]  # fmt: skip
    assert running.http.post("/v1/chat/completions", json={"messages": messages, "tools": [TOOL]}).status_code == 200
    assert kit.eos not in running.engine.requests[-1].prompt
    assert prompt(running).count("<eos>") == 3


def test_every_count_of_a_prompt_is_the_same(server):
    running = server("x")
    post = running.http.post
    function = TOOL["function"]
    chat = post("/v1/chat/completions", json={"messages": [USER], "tools": [TOOL]}).json()["usage"]
    flat = {"type": "function", **function}
    anthropic = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    message = {"messages": [USER], "tools": [anthropic]}
    answer = post("/v1/messages", json={**message, "max_tokens": 9}).json()["usage"]
    counts = [
        post("/tokenize", json={"messages": [USER], "tools": [TOOL]}).json()["count"],
        post("/v1/messages/count_tokens", json=message).json()["input_tokens"],
        answer["input_tokens"] + answer["cache_read_input_tokens"],
        post("/v1/responses/input_tokens", json={"input": [USER], "tools": [flat]}).json()["input_tokens"],
        post("/v1/responses", json={"input": [USER], "tools": [flat]}).json()["usage"]["input_tokens"],
        len(running.engine.requests[-1].prompt),
    ]
    assert counts == [chat["prompt_tokens"]] * 6


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_forms_as_other_servers_spell_them_are_the_same_grammars(server, path):
    running = server("x")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {"messages": [USER]} if "chat" in path else {"prompt": "x"}
    for short, long in (
        ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"json_schema": schema}, {"json": schema}),
        ({"json_schema": {}}, {"json": {}}),
    ):
        for more in (short, {"structured_outputs": long}):
            assert running.http.post(path, json={**body, **more}).status_code == 200
        mine, theirs = (request.grammar for request in running.engine.requests[-2:])
        assert mine == theirs != ""
