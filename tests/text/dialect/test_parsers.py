"""Every syntax, in pieces of every size: the fixtures, and what else models have been seen to write."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = json.loads((Path(__file__).parents[2] / "data" / "parser_fixtures.json").read_text())["parsers"]
NAMES = {"minimax_m2": "minimax_xml"}

TC, TE = "<tool_call>", "</tool_call>"
CASES = [
    ("hermes", 'see <b> {"a": 1} and 2 < 3', 'see <b> {"a": 1} and 2 < 3', []),
    ("hermes", f'{TC}{{"name": "run", "arguments": {{"command": "a\\"{TE}"}}}}{TE}', "", [("run", {"command": f'a"{TE}'})]),
    ("hermes", f'{TC}{{"arguments": {{"minutes": 1}}, "name": "set_timer"}}{TE}', "", [("set_timer", {"minutes": 1})]),
    ("hermes", f'{TC}{{"name": "ping"}}{TE}', "", [("ping", {})]),
    ("hermes", f'{TC}{{"name": "ping", "arguments": null}}{TE}', "", [("ping", {})]),
    ("hermes", f'{TC}{{"name": "ping", "arguments": "{{\\"a\\": [1]}}"}}{TE}', "", [("ping", {"a": [1]})]),
    ("hermes", f'{TC}{{"name": "run", "arguments": {{"command": "a\nb\\q"}}}}{TE}', "", [("run", {"command": "a\nb\\q"})]),
    ("hermes", f'{TC}{{"name": "run", "arguments": {{"command": "{{[\\\\"}}}}{TE}', "", [("run", {"command": "{[\\"})]),
    ("hermes", f'{TC}{{"name": "run", "arguments": {{"command": "é😀"}}}}\n', "", [("run", {"command": "é😀"})]),
    ("hermes", f'{TC}{{"name": "run", "arguments": {{"command": "x"}}{TE} done', "done", [("run", {"command": "x"})]),
    ("hermes", f"use {TC} like this", f"use {TC} like this", []),
    ("hermes", f'{TC} no {TC}{{"name": "ping"}}{TE}', f"{TC} no", [("ping", {})]),
    ("hermes", f'{TC}{{"name": "ping"}}{TE}\n{TC}{{"nam', f'{TC}{{"nam', [("ping", {})]),
    ("qwen3_coder", "Write <function=example> and </function>\n", "Write <function=example> and </function>\n", []),
    ("qwen3_coder", f"{TC}\n<function=ping>\n</function>\n{TE}", "", [("ping", {})]),
    ("qwen3_coder", f"{TC}<function=ping></function>{TE}", "", [("ping", {})]),
    (
        "qwen3_coder",
        f"{TC}\n<function=run>\n<parameter=command>\nuptime\n</parameter>\n</parameter>\n</function>\n</function>\n{TE}\n{TE}",
        "", [("run", {"command": "uptime"})],
    ),
    (
        "qwen3_coder",
        f"{TC}\n<function=write_file>\n<parameter=content>\n<parameter=x>\n</parameter> <b>\n</parameter>\n</function>\n{TE}",
        "", [("write_file", {"content": "<parameter=x>\n</parameter> <b>"})],
    ),
    (
        "qwen3_coder",
        f"{TC}\n<function=run>\n<parameter=command>\nls\n<parameter=timeout>\n5\n</parameter>\n</function>\n{TE}",
        "", [("run", {"command": "ls", "timeout": 5})],
    ),
    (
        "qwen3_coder",
        f"{TC}\n<function=run>\n<parameter=command>\nls\n</parameter>\n<parameter=command>\nrm\n</parameter>\n</function>\n{TE}",
        "", [("run", {"command": "ls"})],
    ),
    ("qwen3_coder", f"{TC}\n<function=run>\n<parameter=command>\n\n\n</parameter>\n</function>\n{TE}", "", [("run", {"command": "\n"})]),
    ("qwen3_coder", f"{TC}\n<function=run>\n<parameter=command\nls\n</parameter>\n</function>\n{TE}", "", [("run", {})]),
    ("qwen3_coder", f"{TC}\n<function=run>\n<parameter=command>\nls", "", [("run", {"command": "ls"})]),
    (
        "qwen3_coder",
        f"<function=nothing>\n{TC}\n<function=ping>\n</function>\n{TE}", "<function=nothing>", [("ping", {})],
    ),
    (
        "minimax_xml",
        ('<minimax:tool_call>\n<invoke name="run">\n<parameter name="command"> a\n</parameter>\n</invoke>\n<invoke name="run">\n'
        '<parameter name="command">b</parameter>\n<parameter name="timeout">1</parameter>\n</invoke>\n</minimax:tool_call>'),
        "", [("run", {"command": " a\n"}), ("run", {"command": "b", "timeout": 1})],
    ),
    (
        "minimax_xml",
        ('<minimax:tool_call><invoke name="nobody"><parameter name="x">[1]</parameter></invoke><invoke name="ping"></invoke>'
        "</minimax:tool_call>ok"),
        "ok", [("nobody", {"x": [1]}), ("ping", {})],
    ),
    ("mistral", 'Sure.[TOOL_CALLS]run[ARGS]{"command": "a]"}', "Sure.", [("run", {"command": "a]"})]),
    (
        "mistral",
        '[TOOL_CALLS]run[CALL_ID]abc123def[ARGS]{"command": "a"}[TOOL_CALLS]ping[ARGS]{}',
        "", [("run", {"command": "a"}), ("ping", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "ping", "arguments": {}}, {"name": "run", "arguments": {"command": "[TOOL_CALLS]"}, "id": "x"}]',
        "", [("ping", {}), ("run", {"command": "[TOOL_CALLS]"})],
    ),
    ("mistral", "[TOOL_CALLS] is a token", "[TOOL_CALLS] is a token", []),
    ("llama3_json", '{"name": "run", "parameters": {"command": "a"}}', "", [("run", {"command": "a"})]),
    ("llama3_json", '<|python_tag|>{"name": "ping", "parameters": {}}; {"name": "ping", "parameters": {}}', "", [("ping", {})] * 2),
    ("llama3_json", '{"type": "function", "name": "ping", "parameters": {}}', "", [("ping", {})]),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", '{"city": "Graz"}', '{"city": "Graz"}', []),
    ("llama3_json", 'x\n{"name": "ping", "parameters": {}}', 'x\n{"name": "ping", "parameters": {}}', []),
    ("bare_json", 'x\n{"name": "ping", "arguments": {}}\ny', "x\ny"[:1] + "y", [("ping", {})]),
    ("bare_json", '[{"name": "ping", "arguments": {}}, {"name": "run", "arguments": {"command": "]"}}]', "", [("ping", {}), ("run", {"command": "]"})]),
    ("bare_json", "[1, 2]\n{x}\n", "[1, 2]\n{x}\n", []),
    ("pythonic", "[run(command='a\\'\\n\\u00e9', timeout=5), ping()]", "", [("run", {"command": "a'\né", "timeout": 5}), ("ping", {})]),
    ("pythonic", '[lookup(tags=["a", \'b)\'], exact=True, kind=None, opts={"deep": [1, (2,)]})]', "",
     [("lookup", {"tags": ["a", "b)"], "exact": True, "kind": None, "opts": {"deep": [1, [2]]}})]),
    ("pythonic", 'On it.<|tool_call_start|>[run(command="""a"b\n""")]<|tool_call_end|>', "On it.", [("run", {"command": 'a"b\n'})]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("gemma", '<|tool_call>call:run{command:<|"|>a, {b}: <|"|>,timeout:5}<tool_call|>', "", [("run", {"command": "a, {b}: ", "timeout": 5})]),
    ("gemma", '<|tool_call>call:lookup{zip:00742,tags:[<|"|>x<|"|>],opts:{deep:true,<|"|>q<|"|>:[1,{}]}}<tool_call|>ok', "ok",
     [("lookup", {"zip": "00742", "tags": ["x"], "opts": {"deep": True, "q": [1, {}]}})]),
    ("gemma", "<|tool_call>call:ping{}<tool_call|><|tool_call>call:ping{}<tool_call|>", "", [("ping", {})] * 2),
    ("gemma", "<|tool_call>what", "<|tool_call>what", []),
    ("glm4", f"{TC}ping\n{TE}", "", [("ping", {})]),
    (
        "glm4",
        (f'ok\n{TC}lookup\n<arg_key>zip</arg_key>\n<arg_value>00742</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["</arg_value>"]'
        f"</arg_value>\n{TE}\n{TC}run\n<arg_key>command</arg_key>\n<arg_value> a\n</arg_value>\n{TE}"),
        "ok", [("lookup", {"zip": "00742", "tags": ["</arg_value>"]}), ("run", {"command": " a\n"})],
    ),
    ("glm4", f"{TC} is a tag", f"{TC} is a tag", []),
    (
        "deepseek",
        ('Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{"command": "```"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        "Hm.", [("run", {"command": "```"}), ("ping", {})],
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{"command": "a"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "", [("run", {"command": "a"})],
    ),
    (
        "deepseek_v32",
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="lookup">\n<｜DSML｜parameter name="zip" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="any" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
        "", [("lookup", {"zip": "1", "any": [1]})],
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", FIXTURES, ids=lambda case: case["id"])
def test_the_fixtures_in_pieces_of_every_size(kit, case):
    parser = NAMES.get(case["parser"], case["parser"])
    text = case["text"]
    for pieces in (*(kit.cuts(text, size) for size in range(1, len(text) + 1)), *case.get("splits", ())):
        answer = kit.read(parser, pieces)
        assert answer.parsed == case["calls"]
        assert (answer.text or None) == case["content"]
        assert all(ended for *_, ended in answer.calls)


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_what_models_write(kit, parser, text, content, calls):
    want = [{"name": name, "arguments": arguments} for name, arguments in calls]
    for size in (1, 2, 3, 7, len(text)):
        answer = kit.read(parser, kit.cuts(text, size))
        assert answer.text == content
        assert answer.parsed == want


@pytest.mark.parametrize("name", ["qwen3_xml"])
def test_two_names_of_one_spelling(kit, name):
    assert kit.known[name].tools is kit.known["qwen3_coder"].tools


@pytest.mark.parametrize(
    ("parser", "text", "name", "shown"),
    [
        ("hermes", f'{TC}{{"name": "write_file", "arguments": {{"content": "abc', "write_file", '{"content": "abc'),
        ("qwen3_coder", f"{TC}\n<function=write_file>\n<parameter=content>\nabc", "write_file", '{"content": "abc'),
        (
            "minimax_xml",
            '<minimax:tool_call><invoke name="write_file"><parameter name="content">abc',
            "write_file",
            '{"content": "abc',
        ),
        ("glm4", f"{TC}write_file\n<arg_key>content</arg_key>\n<arg_value>abc", "write_file", '{"content": "abc'),
        ("mistral", '[TOOL_CALLS]write_file[ARGS]{"content": "abc', "write_file", '{"content": "abc'),
        ("llama3_json", '{"name": "write_file", "parameters": {"content": "abc', "write_file", '{"content": "abc'),
        ("pythonic", "[write_file(content='abc", "write_file", '{"content": "abc'),
        ("gemma", '<|tool_call>call:write_file{content:<|"|>abc', "write_file", '{"content": "abc'),
        ("deepseek", '<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{"content": "abc', "write_file", '{"content": "abc'),
    ],
)
def test_long_arguments_are_passed_on_while_they_are_written(kit, parser, text, name, shown):
    reader = kit.known[parser].tools.parser(kit.tools)
    answer = kit.answer().add(reader.push(text))
    assert answer.calls == [(name, shown, False)]
    answer.add(reader.finish(cut=True))
    assert answer.calls == [(name, shown, False)], "a cut call has no end, and nothing is made up for it"
    assert answer.text == ""


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_no_markup_is_shown_wherever_an_answer_is_cut(kit, parser, text, content, calls):
    if not calls:
        return
    for end in range(len(text)):
        answer = kit.read(parser, kit.cuts(text[:end], 5), cut=True)
        assert len(answer.text) <= len(content) + 4, f"cut at {end}: {answer.text!r}"
        assert [name for name, *_ in answer.calls] == [name for name, _ in calls][: len(answer.calls)]


MARKUP = [
    TC, TE, "<function=", "run", "ping", ">", "</function>", "<parameter=", "command", "</parameter>", "\n", " ", '"', "{", "}",
    "[", "]", ":", ",", '"name"', '"arguments"', '"parameters"', '"run"', "\\", "<", "</", "<minimax:tool_call>", "</minimax:tool_call>",
    '<invoke name="run">', "</invoke>", '<parameter name="timeout">', "5", "null", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "run(", "command=", ")", "'", "<|tool_call>", "<tool_call|>", "call:", '<|"|>', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```", "json", "<｜DSML｜function_calls>",
    '<｜DSML｜invoke name="run">', '<｜DSML｜parameter name="command" string="true">', "é", "\x00", "\ud800", "<|tool_call_start|>", ";",
]  # fmt: skip
PARSERS = [
    "hermes", "qwen3_coder", "minimax_xml", "mistral", "llama3_json", "bare_json", "pythonic", "gemma", "glm4", "deepseek",
]  # fmt: skip


@pytest.mark.parametrize("parser", PARSERS)
@given(words=st.lists(st.sampled_from(MARKUP) | st.text(max_size=3), max_size=30), cut=st.booleans(), data=st.data())
def test_any_text_in_any_pieces_gives_the_same(kit, parser, words, cut, data):
    whole = kit.read(parser, "".join(words), cut=cut)
    text = "".join(words)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    answer = kit.read(parser, pieces, cut=cut)
    assert (answer.text, answer.calls) == (whole.text, whole.calls)
    if not whole.calls and not cut:
        assert whole.text == text
    if not cut:
        assert all(ended for *_, ended in whole.calls)


@pytest.mark.parametrize("parser", PARSERS)
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{\n"), max_size=80))
def test_plain_text_goes_through(kit, parser, text):
    assert kit.read(parser, kit.cuts(text, 3)).text == text


TAGGED = ["qwen3_coder", "minimax_xml", "glm4", "deepseek"]


@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_xml", "glm4"])
@given(words=st.lists(st.sampled_from(MARKUP) | st.text(max_size=3), max_size=20))
def test_arguments_in_tags_are_always_json(kit, parser, words):
    for _, written, _ in kit.read(parser, "".join(words)).calls:
        assert isinstance(json.loads(written), dict)


def test_a_deep_nest_is_no_trouble(kit):
    deep = "[" * 50_000
    for parser in PARSERS:
        kit.read(parser, [TC, '{"name": "run", "arguments": {"x": ', deep, "]" * 10])
        kit.read(parser, [f"{TC}\n<function=run>\n<parameter=any>\n", deep, "\n</parameter>\n</function>"])
    kit.read("gemma", ["<|tool_call>call:run{a:", deep, "}<tool_call|>"])
    kit.read("pythonic", ["[run(a=", deep, ")]"])


def test_markup_that_is_undecided_for_long_is_text(kit):
    text = f'{TC}{{"arguments": {{"x": "' + "y" * 100_000
    assert kit.read("hermes", kit.cuts(text, 1000)).text == text
