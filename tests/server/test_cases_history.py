"""Histories as agents send them back, over HTTP: results of tools, thoughts, items of every kind (31, 34)."""

import time

import pytest

from atlas_core.text.template import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}>{% endfor %}{% endfor %}[assistant]"
)
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "view", "input": {}}]}


@pytest.fixture(scope="module")
def server(serve_module, kit):
    template = ChatTemplate(TEMPLATE, {}, strftime=time.strftime)
    engine = kit.engine(lambda request: kit.deltas(request, "ok", context=4096), context=4096)
    return serve_module(engine, served=kit.model(template=template, speech=kit.speech("", tools=("hermes",))))


def prompt(server):
    return bytes(token for token in server.engine.requests[-1].prompt if token < 256).decode()


def messages(server, turns, path="/v1/messages"):
    return server.http.post(path, json={"model": "tiny", "max_tokens": 9, "messages": turns})


# 31


RESULTS = [
    ({"content": [{"type": "text", "text": "ok"}]}, "ok"), ({}, ""), ({"content": ""}, ""), ({"content": []}, ""),
    ({"content": "bad", "is_error": True}, "bad"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "shown"), RESULTS)
def test_case_31_every_form_of_a_result(server, more, shown):
    turns = [
        {"role": "user", "content": "go"},
        CALL,
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", **more}]},
    ]
    answer = messages(server, turns)
    assert answer.status_code == 200, answer.text
    assert "<view>[tool]" in prompt(server)
    assert shown in prompt(server).partition("[tool]")[2]
    usage = answer.json()["usage"]
    counted = messages(server, turns, "/v1/messages/count_tokens").json()["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_case_31_results_come_before_the_text_of_their_message(server):
    twice = {"role": "assistant", "content": [{**CALL["content"][0], "id": name} for name in ("t1", "t2")]}
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in ("t1", "t2")]
    turns = [
        {"role": "user", "content": "go"},
        twice,
        {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
    ]
    assert messages(server, turns).status_code == 200
    assert prompt(server).endswith("[tool]t1[tool]t2[user]and?[assistant]")


@pytest.mark.parametrize("content", ["", []])
def test_case_31_an_empty_turn_of_the_assistant(server, content):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "b"},
    ]
    assert messages(server, turns).status_code == 200


def test_case_31_an_image_is_named_where_nobody_can_see(server):
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}, PICTURE]}
    turns = [{"role": "user", "content": "go"}, CALL, {"role": "user", "content": [result]}]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = messages(server, turns, path)
        assert answer.status_code == 400
        assert "messages[2].content[0].content[1]" in answer.json()["error"]["message"]


# 34


HISTORY = [
    {"role": "developer", "content": "x"}, {"role": "user", "content": "go"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": ""},
    {"type": "function_call", "call_id": "c1", "name": "sh", "arguments": '{"cmd":"ls"}'},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Running."}]},
    {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
]  # fmt: skip


def respond(server, **body):
    return server.http.post("/v1/responses", json={"max_output_tokens": 9, **body})


def test_case_34_the_call_and_the_text_are_one_turn(server):
    assert respond(server, input=HISTORY).status_code == 200
    assert prompt(server) == "[system]x[user]go[assistant]Running.<sh cmd=ls>[tool]a.txt[assistant]"


def test_case_34_an_output_in_parts(server):
    parts = [{"type": "input_text", "text": "a.txt"}]
    assert respond(server, input=[*HISTORY[:-1], {**HISTORY[-1], "output": parts}]).status_code == 200
    assert "[tool]a.txt" in prompt(server)
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    answer = respond(server, input=[*HISTORY[:-1], {**HISTORY[-1], "output": [*parts, picture]}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[5].output[1]")


def test_case_34_tools_that_nobody_here_has(server):
    tools = [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "n", "tools": []},
    ]
    answer = respond(server, input=HISTORY, tools=tools)
    assert answer.status_code == 200
    assert answer.json()["output"][0]["content"][0]["text"] == "ok"


def test_case_34_going_on_is_the_same_as_sending_everything_again(server):
    first = respond(server, input=HISTORY).json()
    answer = respond(server, input=[{"role": "user", "content": "and?"}], previous_response_id=first["id"])
    assert answer.status_code == 200
    chained = server.engine.requests[-1].prompt
    assert respond(server, input=[*HISTORY, *first["output"], {"role": "user", "content": "and?"}]).status_code == 200
    assert server.engine.requests[-1].prompt == chained


def test_case_34_what_is_not_there(server):
    answer = respond(server, input="x", previous_response_id="resp_nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
    kept = respond(server, input="x", store=False).json()["id"]
    assert server.http.get(f"/v1/responses/{kept}").status_code == 404
    answer = respond(server, input=[HISTORY[1], HISTORY[-1]])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1].call_id")
