"""From Anthropic's requests to the internal form: nothing is lost, nothing but RequestError is raised, and it names the field."""

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jiter import from_json
from wire_forms import as_messages, conversations

from atlas_core.server.messages.face import Messages, read
from atlas_core.server.messages.partial import read_input
from atlas_core.server.messages.schema import CountRequest, MessagesRequest
from atlas_core.server.messages.volatile import stable
from atlas_core.server.schema import ChatRequest, read_request
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.messages import Ready

USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "view", "input": {}}
CALLED = [USER, {"role": "assistant", "content": [CALL]}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def translated(**body):
    return read(CountRequest, {"messages": [USER], **body})


@given(conversations())
def test_there_and_back(conversation):
    """The internal form is what the chat endpoint takes, and all of it can be said to the messages endpoint."""
    sent = json.loads(json.dumps(as_messages(conversation)))
    assert translated(**sent)[0].messages == conversation
    assert read_request(ChatRequest, json.loads(json.dumps({"messages": conversation}))).messages == conversation


WORDS = st.sampled_from(
    ["type", "role", "content", "text", "user", "assistant", "system", "tool_result", "tool_use", "id", "tool_use_id", "t1",
     "name", "input", "thinking", "signature", "image", "source", "base64", "url", "data", "media_type", "document", "title",
     "search_result", "tool_reference", "tool_name", "is_error", "input_schema", "redacted_thinking", "web_fetch"],
)  # fmt: skip
RUBBISH = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=5)),
    max_leaves=12,
)
BLOCKS = st.builds(lambda kind, rest: {"type": kind, **rest}, WORDS, st.dictionaries(WORDS, RUBBISH, max_size=5))
MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system", "tool"]), st.one_of(RUBBISH, st.lists(BLOCKS, max_size=3)),
)  # fmt: skip


@given(
    messages=st.lists(st.one_of(MESSAGES, st.sampled_from(CALLED)), max_size=4),
    more=st.dictionaries(
        st.sampled_from(["system", "tools", "tool_choice", "thinking", "output_config", "output_format", "max_tokens", "thread"]),
        st.one_of(RUBBISH, st.lists(st.dictionaries(WORDS, RUBBISH, max_size=4), max_size=2)), max_size=3,
    ),
)  # fmt: skip
def test_rubbish_is_refused_by_name(face, model, messages, more):
    try:
        request, _ = read(CountRequest, {"messages": messages, **more})
        face.reading(request, model)
        face.prompt(request, model, Ready(512, 1, 300, "f"))
    except RequestError as error:
        assert error.field is None or error.field.split("[")[0].split(".")[0] in {"messages", *more}, error
        assert error.field is not None or error.code == "chat_template"


@pytest.fixture(scope="module")
def model(kit):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    )
    return kit.model(
        template=ChatTemplate(template, {}, strftime=time.strftime), speech=kit.speech("", tools=("hermes",))
    )


@pytest.fixture(scope="module")
def face():
    return Messages()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "text", "text": "ok"}]}, "ok"),
        ({"content": [{"type": "tool_reference", "tool_name": "grep"}]}, "The tool grep is available."),
    ],
)
def test_results_of_tools(content, expected):
    result = {"type": "tool_result", "tool_use_id": "t1", **content}
    request, _ = translated(messages=[*CALLED, {"role": "user", "content": [result]}])
    assert request.messages[2:] == [{"role": "tool", "tool_call_id": "t1", "content": expected}]


def test_results_come_before_the_text_of_their_message():
    blocks = [
        {"type": "text", "text": "so?"},
        *({"type": "tool_result", "tool_use_id": "t1", "content": each} for each in "ab"),
    ]
    request, _ = translated(messages=[*CALLED, {"role": "user", "content": blocks}])
    assert [(m["role"], m["content"]) for m in request.messages[2:]] == [("tool", "a"), ("tool", "b"), ("user", "so?")]


def test_turns_of_one_role_are_one():
    request, _ = translated(
        messages=[
            USER, USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ]
    )  # fmt: skip
    assert [m["role"] for m in request.messages] == ["user", "assistant", "tool"]
    assert request.messages[0]["content"] == [{"type": "text", "text": "hi"}] * 2
    assert (request.messages[1]["content"], len(request.messages[1]["tool_calls"])) == ("a", 1)


def test_documents_that_are_text():
    plain = {
        "type": "document",
        "title": "T",
        "context": "C",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    inner = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "E"}]}}
    found = {"type": "search_result", "title": "S", "source": "U", "content": [{"type": "text", "text": "F"}]}
    request, _ = translated(messages=[{"role": "user", "content": [plain, inner, found]}])
    assert "".join(part["text"] for part in request.messages[0]["content"]) == "T\nC\nDES\nU\nF"


def test_what_is_unknown_is_left_out_and_told():
    request, unknown = translated(
        messages=[USER, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "web"}, {"type": "text", "text": "x"}]}, USER],
        tools=[{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": {"type": "object"}}],
        novelty=1, metadata={"user_id": "u"}, cache_control={"type": "ephemeral"}, context_management={"edits": []}, stream=True,
    )  # fmt: skip
    assert unknown == ["novelty", "content of type server_tool_use", "tools of type web_search_20250305"]
    assert request.messages[1] == {"role": "assistant", "content": "x"}
    assert [tool["function"] for tool in request.tools] == [{"name": "f", "parameters": {"type": "object"}}]


def test_thinking_and_effort():
    def asked(**body):
        request, _ = translated(**body)
        return request.thinking_token_budget, request.chat_template_kwargs, request.reasoning_effort

    on = {"enable_thinking": True, "thinking": True}
    assert asked() == (None, None, None)
    assert asked(thinking={"type": "enabled", "budget_tokens": 1024}) == (1024, on, None)
    assert asked(thinking={"type": "adaptive", "display": "omitted"}) == (None, on, None)
    assert asked(thinking={"type": "disabled"}) == (0, None, None)
    assert asked(output_config={"effort": "low"}) == (None, None, "low")
    assert asked(output_config={"effort": "max"}) == (None, None, "max")
    assert asked(thinking={"type": "adaptive"}, chat_template_kwargs={"thinking": 5})[1] == {**on, "thinking": 5}


def test_tool_choice():
    def asked(choice):
        request, _ = translated(tool_choice=choice)
        return request.tool_choice, request.parallel_tool_calls

    assert asked(None) == (None, True)
    assert asked({"type": "auto", "disable_parallel_tool_use": True}) == ("auto", False)
    assert asked({"type": "any"}) == ("required", True)
    assert asked({"type": "none"}) == ("none", True)
    assert asked({"type": "tool", "name": "f"}) == ({"type": "function", "function": {"name": "f"}}, True)


def test_a_last_turn_of_the_assistant_is_gone_on_with():
    request, _ = translated(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    request, _ = translated()
    assert (request.continue_final_message, request.add_generation_prompt) == (False, True)


def test_what_changes_with_every_request_is_left_out():
    billing = "x-anthropic-billing-header: cc_version=2.1.332; cch=abc;"
    system = [
        {"type": "text", "text": text}
        for text in (billing, "One.", "Two.\n<total_tokens>1234 left</total_tokens>\nThree.")
    ]
    late = {"role": "system", "content": f"Now.\n{billing}\nHere.<total_tokens>9</total_tokens>"}
    request, _ = translated(system=system, messages=[USER, late, {"role": "system", "content": billing}])
    assert [m["content"] for m in request.messages] == ["One.\n\nTwo.\nThree.", "hi", "Now.\nHere."]
    user = {"role": "user", "content": f"What is {billing}?"}
    assert translated(messages=[user])[0].messages == [user]
    assert stable("a x-anthropic-billing-header: b") == "a x-anthropic-billing-header: b"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": [{**CALL, "input": "{}"}]}]}, "messages[1].content[0].input"),
        ({"messages": CALLED}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "", "media_type": "application/pdf"}}]}]}, "messages[0].content[0].source"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "endless"}}, "output_config.effort"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(body, field):
    with pytest.raises(RequestError) as caught:
        translated(**body)
    assert caught.value.field == field
    assert field in caught.value.what or caught.value.what.startswith(("tool_choice", "thinking"))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}, "messages[1].content[1]"),
        (
            {"system": "s", "messages": [*CALLED, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}]}]},
            "messages[2].content[0].content[0]",
        ),
        ({"tools": [{"type": "x_1", "name": "x"}, {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "tools[1].name"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "string", "not": {}}}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
def test_what_the_rest_of_the_server_refuses_is_named_as_it_came(face, model, body, field):
    request, _ = translated(**body)

    def ask():
        face.reading(request, model)
        face.prompt(request, model, Ready(512, 1, 300, "f"))

    with pytest.raises(RequestError) as caught:
        ask()
    assert caught.value.field == field
    assert "function" not in caught.value.what


def test_limits_and_sampling_are_those_of_the_chat_endpoint():
    request, _ = read(
        MessagesRequest, {"messages": [USER], "max_tokens": 7, "temperature": 0.5, "top_k": 3, "stop_sequences": ["x"]}
    )
    assert (request.max_tokens, request.temperature, request.top_k, request.stop) == (7, 0.5, 3, ["x"])
    with pytest.raises(RequestError) as caught:
        read(MessagesRequest, {"messages": [USER]})
    assert (caught.value.field, caught.value.code) == ("max_tokens", "missing_field")


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)


@given(value=st.dictionaries(st.text(max_size=3), VALUES, max_size=3), share=st.floats(0, 1))
def test_the_input_of_a_call_that_was_cut(value, share):
    """As SDKs read it from a stream, but for a last number or word, of which nobody knows whether it is whole."""
    text = json.dumps(value)
    assert read_input(text) == value
    cut = text[: int(share * len(text))]
    known = re.sub(r"[-+.0-9A-Za-z]+$", "", cut)
    assert read_input(cut) == (from_json(known.encode(), partial_mode=True) if known else {})


def test_an_input_that_is_no_object():
    assert read_input("[1]") == {"arguments": [1]}
    assert read_input("rubbish") == {"arguments": "rubbish"}
    assert read_input(" ") == {}
