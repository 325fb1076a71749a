import json

import pytest

from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.errors import CheckpointError, RequestError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def template(source=CHATML, **special):
    return ChatTemplate(source, special, strftime=lambda form: f"<{form}>")


def call(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def goldens(shared):
    golden = json.loads((shared / "assets" / "goldens" / "chat_templates.json").read_text(encoding="utf-8"))
    folder = shared / "assets" / "templates" / "llama.cpp-b11434"
    for name, cases in golden["templates"].items():
        if name not in golden["time_dependent"]:
            source = (folder / f"{name}.jinja").read_text(encoding="utf-8")
            yield name, template(source, **golden["special_tokens"]), golden["cases"], cases


def render(chat, case):
    fields = dict(case)
    return chat.render(
        fields.pop("messages"),
        tools=fields.pop("tools", None),
        add_generation_prompt=fields.pop("add_generation_prompt", True),
        extra=fields,
    )


def test_real_templates_render_as_the_reference_does(shared):
    compared = 0
    for name, chat, cases, expected in goldens(shared):
        for case, result in expected.items():
            # These two inputs are brought into shape first, where the reference passes them on as they are.
            if case in {"tools_called_string_args", "content_parts"}:
                continue
            # Refused by the reference, and said one after the other here.
            if case == "parallel_calls" and not chat.abilities.parallel_calls:
                assert "text" not in result
                continue
            if "text" in result:
                assert render(chat, cases[case]) == result["text"], (name, case)
                compared += 1
            else:
                with pytest.raises(RequestError):
                    render(chat, cases[case])
    assert compared > 150


def test_real_templates_take_arguments_as_text_and_content_in_parts(shared):
    compared = 0
    for name, chat, cases, expected in goldens(shared):
        compared += ("text" in expected["tools_called"]) + ("text" in expected["plain"])
        if "text" in expected["tools_called"]:
            assert render(chat, cases["tools_called_string_args"]) == expected["tools_called"]["text"], name
        if "text" in expected["plain"]:
            prompt = render(chat, cases["content_parts"])
            assert "Hello" in prompt, name
            assert "parts" in prompt, name
            assert "'type'" not in prompt, name
    assert compared > 10


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [('{"town": "Graz"}', '{"town": "Graz"}'), ({"town": "Graz"}, '{"town": "Graz"}'), ("", "{}"), (None, "{}")],
)
def test_arguments_become_objects(arguments, printed):
    prompt = template().render([USER, call(arguments)], add_generation_prompt=False)
    assert prompt.endswith(f"<|im_start|>assistant\n<call>f {printed}</call><|im_end|>\n")


@pytest.mark.parametrize("arguments", ["null", "[1]", '{"a":', "not json", 5, "[" * 100000])
def test_arguments_that_are_no_object(arguments):
    with pytest.raises(RequestError) as caught:
        template().render([USER, call(arguments)])
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"


def test_a_template_that_prints_arguments_gets_text():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert template(source).render([USER, call({"town": "Zürich"})]) == '{"town": "Zürich"}'


def test_the_clock_is_handed_in():
    assert template("{{ strftime_now('%Y-%m-%d') }}").render([USER]) == "<%Y-%m-%d>"


def test_a_refusal_is_in_the_template_s_words():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    with pytest.raises(RequestError) as caught:
        template(source).render([{"role": "system", "content": "x"}])
    assert caught.value.what == "no system role"
    assert caught.value.kind == "invalid"


def test_empty_fields_are_no_fields():
    plain = template().render([USER, {"role": "assistant"}])
    assert template().render([USER, {"role": "assistant", "content": None, "tool_calls": []}], tools=[]) == plain


def test_parts_are_joined_for_a_template_that_wants_text():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert template().render([{"role": "user", "content": parts}]) == template().render(
        [{"role": "user", "content": "a b"}]
    )
    with pytest.raises(RequestError) as caught:
        template().render([{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {}}]}])
    assert (caught.value.field, caught.value.kind) == ("messages[0].content[2]", "unsupported")


def test_parts_are_kept_for_a_template_that_knows_them():
    source = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    assert template(source).render([{"role": "user", "content": [{"type": "text", "text": "a"}]}]) == "[a]"


def test_json_is_not_escaped_for_html():
    tools = [{"function": {"name": "f", "description": "<b> it's Ü & \u2028"}}]
    prompt = template().render([USER], tools=tools, add_generation_prompt=False)
    assert prompt.endswith('[{"function": {"name": "f", "description": "<b> it\'s Ü & \u2028"}}]')


def test_tojson_takes_the_options_that_templates_use():
    source = "{{ {'b': 1, 'a': 'é'} | tojson(indent=2, sort_keys=true) }}"
    assert template(source).render([USER]) == '{\n  "a": "é",\n  "b": 1\n}'


def test_real_templates_print_system_messages_wherever_they_stand(shared):
    """Or as part of other turns: agents put the state of their surroundings into the middle of the conversation."""
    system, user, said = ({"role": role, "content": f"{role} x"} for role in ("system", "user", "assistant"))
    late = {"role": "system", "content": "needle"}
    able, moved = 0, 0
    for name, chat, _, _ in goldens(shared):
        try:
            chat.render([system, user, said, user])
        except RequestError:
            continue  # takes no system message at all, or needs tools
        for messages in ([system, user, late], [system, late, user], [system, user, late, said, late, user]):
            prompt = chat.render(messages)
            assert prompt.count("needle") == messages.count(late), name
            assert "system x" in prompt, name
        able += chat.abilities.late_system
        moved += not chat.abilities.late_system
    assert able > 8
    assert moved > 3


def test_parallel_calls_for_a_template_that_has_one_at_a_time():
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
        "{{ raise_exception('only one') }}{% endif %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
    )
    chat = template(source)
    calls = [{"id": n, "function": {"name": "f", "arguments": {"n": n}}} for n in "abc"]
    said = {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": n, "content": n} for n in "bad"]
    assert not chat.abilities.parallel_calls
    assert template().abilities.parallel_calls
    assert chat.render([USER, said, *results, USER], add_generation_prompt=False) == (
        '[user]hi[assistant]x{"n": "a"}[tool]a[assistant]{"n": "b"}[tool]b[assistant]{"n": "c"}[tool]d[user]hi'
    )
    assert chat.render([USER, call({"n": 1}), results[0]]) == '[user]hi[assistant]{"n": 1}[tool]b'


def test_calls_of_a_template_that_prints_them_where_there_is_no_content():
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = template(source)
    assert chat.abilities.null_content
    assert not template().abilities.null_content
    assert (
        chat.render([USER, call({"n": 1}), {"role": "assistant", "content": None}])
        == '[user]hi[assistant]{"n": 1}[assistant]'
    )


def test_late_system_messages_of_a_template_that_has_one():
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )

    def render(*turns):
        return template(source).render([{"role": role, "content": text} for role, text in turns])

    assert render(("system", "a"), ("developer", "b"), ("user", "c")) == "[system]a\n\nb[user]c"
    assert render(("user", "a"), ("system", "b"), ("user", "c")) == "[user]a\n\nb[user]c"
    assert render(("user", "a"), ("assistant", "b"), ("system", "c")) == "[user]a[assistant]b[user]c"
    assert render(("tool", "a"), ("system", "b"), ("user", "c")) == "[tool]a\n\nb[user]c"
    later = (("assistant", "a"), ("system", "b"), ("system", "c"), ("user", "d"), ("user", "e"))
    assert render(("user", "x"), *later) == "[user]x[assistant]a[user]b\n\nc\n\nd[user]e"
    assert template().abilities.late_system
    first = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert not template(first).abilities.late_system


def test_developer_is_system_where_it_is_unknown():
    message = {"role": "developer", "content": "x"}
    assert "<|im_start|>system\nx" in template().render([message])
    assert template("{{ messages[0].role }}{# developer #}").render([message]) == "developer"


def test_rendering_is_sandboxed():
    with pytest.raises(RequestError):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render([USER])
    with pytest.raises(RequestError):
        template("{{ messages.append(1) }}").render([USER])


def test_generation_blocks_and_loop_controls():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert template(source).render([USER, USER]) == "hi"


def test_the_last_message_is_continued_exactly():
    messages = [USER, {"role": "assistant", "content": "The answer is  "}]
    prompt = template().render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is  "
    trimming = template("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    assert trimming.render(messages, add_generation_prompt=False, continue_final_message=True) == "<hi><The answer is  "


def test_what_cannot_be_continued():
    with pytest.raises(RequestError, match="exclude each other"):
        template().render([USER], continue_final_message=True)
    with pytest.raises(RequestError, match="cannot be continued"):
        template("x").render([USER], add_generation_prompt=False, continue_final_message=True)


def test_variables_of_the_request():
    source = "{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
    assert template(source, bos_token="<s>").render([USER], extra={"enable_thinking": False}) == "<s><no>"
    with pytest.raises(RequestError) as caught:
        template().render([USER], extra={"messages": []})
    assert caught.value.field == "chat_template_kwargs"


def test_a_template_that_is_not_jinja():
    with pytest.raises(CheckpointError, match="not valid") as caught:
        template("{% if %}")
    assert caught.value.why.startswith("line 1")


@pytest.mark.parametrize(
    "messages", [[], [{"content": "x"}], [{"role": "user", "content": 5}], [{"role": "assistant", "tool_calls": [{}]}]]
)
def test_messages_that_are_none(messages):
    with pytest.raises(RequestError) as caught:
        template().render(messages)
    assert caught.value.field.startswith("messages")
