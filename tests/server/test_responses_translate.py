"""From items to the conversation that the chat template is given: nothing is lost, and nothing but RequestError is raised."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.server.conversation import check_messages
from atlas_core.server.responses.growing import GrowingCustomCall, InputReader
from atlas_core.server.responses.items import check_outputs, read_items, seal, thought_of
from atlas_core.server.responses.schema import ResponsesRequest
from atlas_core.server.responses.tools import Tools, chat_choice, custom_arguments, read_tools
from atlas_core.server.responses.translate import chat_request, conversation, in_own_words
from atlas_core.vocab.errors import RequestError


def fresh():
    numbers = itertools.count()
    return lambda prefix: f"{prefix}{next(numbers)}"


def items(*given):
    return read_items(list(given), "input", fresh())[0]


def messages(*given, instructions=None):
    return conversation(items(*given), instructions)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(call_id, arguments="{}", name="sh"):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def gave(call_id, output="ok"):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def call_of(call_id, arguments="{}", name="sh"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_history_as_codex_sends_it():
    found = messages(
        {"role": "developer", "content": "x"}, user("go"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": ""},
        called("c1", '{"cmd":"ls"}'), said("Running."), gave("c1", "a.txt"),
    )  # fmt: skip
    assert found == [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Running.", "tool_calls": [call_of("c1", '{"cmd":"ls"}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ]


def test_items_of_one_answer_are_one_message():
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    found = messages(
        user("a"), thought, said("Look:"), called("1"), called("2"), said("More."), gave("1"), gave("2"), said("Done.")
    )
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "assistant"]
    assert found[1] == {
        "role": "assistant", "content": "Look:\nMore.", "reasoning_content": "Hm.", "tool_calls": [call_of("1"), call_of("2")],
    }  # fmt: skip
    assert found[4] == {"role": "assistant", "content": "Done."}


def test_answers_that_follow_one_another_stay_apart():
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    found = messages(said("one"), said("two"), thought, said("three"))
    assert [(message["content"], message.get("reasoning_content")) for message in found] == [
        ("one", None), ("two", None), ("three", "Hm.")
    ]  # fmt: skip


def test_what_the_system_says_first_is_one_message():
    found = messages({"role": "system", "content": "b"}, {"role": "developer", "content": "c"}, user("d"), {"role": "developer", "content": "e"}, instructions="a")  # fmt: skip
    assert [(m["role"], m["content"]) for m in found] == [("system", "a\n\nb\n\nc"), ("user", "d"), ("developer", "e")]


def test_a_thought_comes_back_from_wherever_it_stands():
    for parts in (
        {"content": [{"type": "reasoning_text", "text": "a ☀"}], "encrypted_content": seal("other")},
        {"encrypted_content": seal("a ☀"), "summary": [{"type": "summary_text", "text": "short"}]},
        {"encrypted_content": "gAAAA-of-somebody-else", "summary": [{"type": "summary_text", "text": "a ☀"}]},
        {"encrypted_content": "bm9uc2Vuc2U=", "summary": [{"type": "summary_text", "text": "a ☀"}]},
    ):
        (item,) = items({"type": "reasoning", **parts})
        assert thought_of(item) == "a ☀"


def test_custom_tools_round_trip():
    text = '*** "Patch"\n\\n ☀'
    found = messages({"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": text}, {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]})  # fmt: skip
    assert found[0]["tool_calls"] == [call_of("c", custom_arguments(text), "patch")]
    assert json.loads(custom_arguments(text)) == {"input": text}
    assert found[1]["content"] == "ab"


def test_a_call_that_was_cut_off_is_left_out():
    cut = {**called("c", '{"a": '), "status": "incomplete"}
    assert messages(user("a"), said("b"), cut, user("c")) == messages(user("a"), said("b"), user("c"))


def test_ids_are_kept_and_unique():
    given = [
        {**user("a"), "id": "msg_x"},
        {**user("b"), "id": "msg_x"},
        {**user("c"), "id": "msg_y"},
        {**user("d"), "id": "sp ace"},
    ]
    found, skipped = read_items(
        [*given, {"type": "web_search_call", "id": "ws_1"}], "input", fresh(), frozenset({"msg_y"})
    )
    assert [item["id"] for item in found] == ["msg_x", "msg_0", "msg_1", "msg_2"]
    assert skipped == ["items of type web_search_call"]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (user([{"type": "input_image", "image_url": "data:image/png;base64,"}]), "content[0]"),
        (user([{"type": "input_file", "file_id": "f"}]), "content[0]"),
        (user([{"type": "input_text"}]), "content[0].text"),
        (user(["text"]), "content[0]"),
        (user(None), "content"),
        ({"role": "tool", "content": "x"}, "role"),
        ({"type": "message", "content": "x"}, "role"),
        ({"type": 5}, "type"),
        ({}, "type"),
        (called("c", "{"), "arguments"),
        (called("c", "[1]"), "arguments"),
        (called(""), "call_id"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "name"),
        ({**called("c"), "namespace": 5}, "namespace"),
        (gave("c", None), "output"),
        (gave("c", [{"type": "input_image", "image_url": "x"}]), "output[0]"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "p"}, "input"),
        ({"type": "reasoning", "summary": 5}, "summary"),
        ({"type": "reasoning", "encrypted_content": 5}, "encrypted_content"),
        ({"type": "item_reference"}, "id"),
    ],
)
def test_what_cannot_be_read_is_named(item, field):
    with pytest.raises(RequestError) as caught:
        items(user("first"), item)
    assert caught.value.field == f"input[1].{field}"


def test_an_output_needs_its_call():
    with pytest.raises(RequestError) as caught:
        check_outputs(items(user("a"), called("c1"), gave("c1"), gave("c2")), 2, "input")
    assert caught.value.field == "input[1].call_id"
    check_outputs(items(gave("gone"), called("c1"), gave("c1")), 1, "input")
    with pytest.raises(RequestError, match="call_id"):
        check_outputs(items({**called("c1", '{"a'), "status": "incomplete"}, gave("c1")), 0, "input")


def test_tools():
    found = read_tools(
        [
            {"type": "web_search"}, {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
            {"type": "namespace", "name": "n", "tools": []}, {"name": "g"},
            {"type": "custom", "name": "p", "description": "Patch.", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
        ]
    )  # fmt: skip
    assert (found.skipped, found.custom) == (("tools of type web_search",), {"p"})
    first, second, custom = (tool["function"] for tool in found.declared)
    assert first == {"name": "f", "description": "d", "strict": True, "parameters": {"type": "object"}}
    assert second == {"name": "g", "parameters": {"type": "object", "properties": {}}}
    assert custom["description"] == "Patch.\n\nThe input follows this lark grammar:\nstart: /a/"
    assert (list(custom["parameters"]["properties"]), custom["parameters"]["required"]) == (["input"], ["input"])


def test_tools_in_namespaces():
    inside = [{"type": "function", "name": "find"}, {"type": "custom", "name": "run"}, {"type": "web_search"}]
    found = read_tools([{"name": "find"}, {"type": "namespace", "name": "mcp__files", "tools": inside}])
    assert [tool["function"]["name"] for tool in found.declared] == ["find", "mcp__files__find", "mcp__files__run"]
    assert found.spaces == {"mcp__files__find": ("mcp__files", "find"), "mcp__files__run": ("mcp__files", "run")}
    assert (found.custom, found.skipped) == ({"mcp__files__run"}, ("tools of type web_search",))
    back = {**called("c", name="find"), "namespace": "mcp__files"}
    assert messages(back)[0]["tool_calls"] == [call_of("c", name="mcp__files__find")]


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "function"}, "name"), ({"name": "a b"}, "name"), ({"name": "f", "parameters": 5}, "parameters"),
        ({"type": "custom", "name": "p", "format": 5}, "format"), ({"type": "custom", "name": "p", "description": 5}, "description"),
        ({"name": "first"}, "name"), ({"type": "namespace", "tools": []}, "name"), ({"type": "namespace", "name": "n"}, "tools"),
        ({"type": "namespace", "name": "n", "tools": [5]}, "tools[0]"), ({"type": "namespace", "name": "n", "tools": [{}]}, "tools[0].name"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be(tool, field):
    with pytest.raises(RequestError) as caught:
        read_tools([{"type": "web_search"}, {"name": "first"}, tool])
    assert caught.value.field == f"tools[2].{field}"


def choice(kind, *names):
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": kind, "tools": functions}}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, "auto"), ("none", "none"), ("auto", "auto"), ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "custom", "name": "p"}, {"type": "function", "function": {"name": "p"}}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]}, choice("auto", "f")),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "f"}, {"type": "custom", "name": "p"}]}, choice("required", "f", "p")),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none"),
    ],
)  # fmt: skip
def test_tool_choices(given, wanted):
    assert chat_choice(given, Tools()) == wanted


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"type": "web_search_preview"}, "tool_choice"), ({"type": "mcp", "server_label": "x"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.name"), ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "x", "tools": [{"name": "f"}]}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [5]}, "tool_choice.tools[0].name"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
    ],
)  # fmt: skip
def test_tool_choices_that_cannot_be(given, field):
    with pytest.raises(RequestError) as caught:
        chat_choice(given, Tools())
    assert caught.value.field == field


def test_errors_name_the_fields_that_were_sent():
    for chat, own in (
        ("messages", "input"), ("response_format.json_schema.schema.x", "text.format.schema.x"), ("max_tokens", "max_output_tokens"),
        ("tool_choice.function.name", "tool_choice.name"), ("temperature", "temperature"), ("messagesque", "messagesque"),
    ):  # fmt: skip
        found = in_own_words(RequestError(f"{chat} is not valid", "why", "cure", field=chat, code="c"))
        assert (found.field, found.what, found.code) == (own, f"{own} is not valid", "c")
    error = RequestError("x", "y", "z")
    assert in_own_words(error) is error


WORDS = st.sampled_from(
    ["", "a", "☀", '{"input": "x"}', "{}", "c1", "user", "assistant", "function", "auto", "in_progress"]
)
KEYS = st.sampled_from(
    ["type", "role", "content", "text", "id", "call_id", "name", "arguments", "input", "output", "summary", "encrypted_content", "status", "refusal"]
)  # fmt: skip
TYPES = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "item_reference",
     "input_text", "output_text", "refusal", "input_image", "web_search_call"]
)  # fmt: skip
RUBBISH = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5) | st.builds(lambda kind, more: {**more, "type": kind}, TYPES, st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=8,
)  # fmt: skip
OBJECTS = st.lists(st.builds(lambda kind, more: {**more, **({"type": kind} if kind else {})}, st.none() | TYPES, st.dictionaries(KEYS, RUBBISH, max_size=6)), max_size=5)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(given_items=OBJECTS, tools=OBJECTS, chosen=st.none() | WORDS | st.dictionaries(KEYS, RUBBISH, max_size=4), form=st.none() | st.dictionaries(KEYS, RUBBISH))  # fmt: skip
def test_rubbish_is_refused_and_never_more(given_items, tools, chosen, form):
    try:
        found, _ = read_items(given_items, "input", fresh())
        check_outputs(found, 0, "input")
        known = [item for item in found if item["type"] != "item_reference"]
        request = ResponsesRequest(tool_choice=chosen, text=None)
        chat = chat_request(request, known, read_tools(tools))
    except RequestError as error:
        assert error.field is not None
        return
    check_messages(chat.messages)
    json.dumps(found)
    assert read_items(found, "input", fresh())[0] == found, "what was read once is read again as the same"


@settings(deadline=None)
@given(text=st.text(), cuts=st.lists(st.integers(0, 400), max_size=6), escaped=st.booleans())
def test_the_input_of_a_custom_tool_is_told_while_it_is_written(text, cuts, escaped):
    written = json.dumps({"input": text}, ensure_ascii=escaped)
    places = sorted({0, len(written), *(cut for cut in cuts if cut < len(written))})
    call = GrowingCustomCall("ctc_1", 0, "c", "p")
    told = [event["delta"] for low, high in itertools.pairwise(places) for event in call.add(written[low:high])]
    events, item = call.end(cut=False)
    told += [event["delta"] for event in events if event["type"].endswith("delta")]
    assert "".join(told) == text == item["input"] == events[-2]["input"]


@pytest.mark.parametrize(
    ("written", "wanted", "status"),
    [
        ('{"input": "ab', "ab", "incomplete"), ('{"input": "a\\', "a", "incomplete"), ("free text", "free text", "incomplete"),
        ('{"other": 1, "input": "x"}', "x", "completed"), ('{"input": 5}', '{"input": 5}', "completed"),
        ('{"input": "\\ud83d"}', "\ufffd", "completed"), ('{"input": "\\q"}', '{"input": "\\q"}', "incomplete"),
        ("{}", "{}", "completed"), ("", "", "incomplete"),
    ],
)  # fmt: skip
def test_arguments_of_another_form(written, wanted, status):
    call = GrowingCustomCall("ctc_1", 0, "c", "p")
    events = [event for char in written for event in call.add(char)]
    more, item = call.end(cut=True)
    told = "".join(event["delta"] for event in events + more if event["type"].endswith("delta"))
    assert (told, item["input"], item["status"]) == (wanted, wanted, status)


def test_half_of_a_pair_is_held_back():
    reader = InputReader()
    assert [reader.push(piece) for piece in ('{"input"', ' : "a', "\\ud83", "d\\ude00", "\\", "n", "\\u26", "00b")] == ["", "a", "", "😀", "", "\n", "", "☀b"]  # fmt: skip


TEXT = st.text(min_size=1, max_size=8)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "patch"]), st.dictionaries(st.sampled_from("ab"), TEXT, max_size=2), TEXT),
    max_size=3,
)


@st.composite
def conversations(draw):
    """Messages as the template is given them: turns of the user, and answers with thoughts, text and calls that have their outputs."""
    found = draw(st.lists(st.builds(lambda text: {"role": "developer", "content": text}, TEXT), max_size=1))
    for turn in range(draw(st.integers(1, 3))):
        found.append({"role": "user", "content": draw(TEXT)})
        answer = {"role": "assistant", "content": draw(st.none() | TEXT)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(TEXT)
        calls = []
        for number, (name, arguments, text) in enumerate(draw(CALLS)):
            written = custom_arguments(text) if name == "patch" else json.dumps(arguments)
            calls.append(call_of(f"c{turn}-{number}", written, name))
        if calls:
            answer["tool_calls"] = calls
        if calls or answer["content"]:
            found.append(answer)
            found += [
                {"role": "tool", "tool_call_id": call["id"], "content": draw(st.text(max_size=8))} for call in calls
            ]
    return found


def as_items(message, place):
    """A message as the items that a client sends for it; the thought at one of the places where it may stand."""
    match message["role"]:
        case "tool":
            custom = message["custom"]
            return [{"type": f"{custom}_output", "call_id": message["tool_call_id"], "output": message["content"]}]
        case "assistant":
            found = []
            if "reasoning_content" in message:
                thought = message["reasoning_content"]
                found.append({"type": "reasoning", "summary": [], **place(thought)})
            if message["content"] is not None:
                found.append(said(message["content"]))
            for call in message.get("tool_calls", ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                custom = {"type": "custom_tool_call", "input": json.loads(arguments).get("input")}
                kind = custom if name == "patch" else {"type": "function_call", "arguments": arguments}
                found.append({"call_id": call["id"], "name": name, **kind})
            return found
    return [message]


PLACES = st.sampled_from(
    [
        lambda thought: {"content": [{"type": "reasoning_text", "text": thought}]},
        lambda thought: {"encrypted_content": seal(thought)},
        lambda thought: {"summary": [{"type": "summary_text", "text": thought}]},
    ]
)


@settings(deadline=None)
@given(wanted=conversations(), place=PLACES)
def test_a_conversation_survives_the_way_there_and_back(wanted, place):
    kinds = {
        call["id"]: "custom_tool_call" if call["function"]["name"] == "patch" else "function_call"
        for message in wanted for call in message.get("tool_calls", ())
    }  # fmt: skip
    sent = [
        item for message in wanted
        for item in as_items(message | {"custom": kinds.get(message.get("tool_call_id"))} if message["role"] == "tool" else message, place)
    ]  # fmt: skip
    read = items(*sent)
    check_outputs(read, 0, "input")
    assert conversation(read) == wanted
