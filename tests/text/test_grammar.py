"""What can be enforced is, and what cannot is refused with its keyword and place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from atlas_core.contracts.dialect import ReasoningSyntax, Tool
from atlas_core.text.dialect import forced
from atlas_core.text.dialect.tags import MINIMAX, QWEN3_CODER
from atlas_core.text.grammar import check, json_grammar, whole_grammar
from atlas_core.text.json_schema import MAX_BYTES
from atlas_core.text.schema.keywords import ANNOTATIONS, FIRST_CLASS
from atlas_core.vocab.errors import RequestError


def refused(schema):
    with pytest.raises(RequestError) as caught:
        check(whole_grammar([json_grammar(schema, "response_format")], None, "closed"), "response_format")
    assert caught.value.field == "response_format"
    return caught.value


@pytest.mark.parametrize(
    ("schema", "keyword", "place"),
    [
        ({"type": "string", "pattern": "^(?!x).*$"}, "pattern", "#/pattern"),
        ({"type": "string", "pattern": "^(a$"}, "pattern", "#/pattern"),
        ({"type": "number", "not": {"multipleOf": 3}}, "multipleOf", "#/not/multipleOf"),
        ({"type": "array", "contains": {"type": "null"}}, "contains", "#/contains"),
        (
            {"properties": {"a/b": {"items": {"uniqueItems": True}}}},
            "uniqueItems",
            "#/properties/a~1b/items/uniqueItems",
        ),
        ({"$ref": "https://example.org/s.json"}, "$ref", "#/$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref", "#/$ref"),
        ({"allOf": [{}, {"dependencies": {}}]}, "dependencies", "#/allOf/1/dependencies"),
        ({"$defs": {"x": {"format": "regex"}}}, "format", "#/$defs/x/format"),
        ({"type": "strin"}, "type", "#/type"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "#/oneOf"),
        ({"anyOf": []}, "anyOf", "#/anyOf"),
        ({"enum": 3}, "enum", "#/enum"),
        ({"required": "a"}, "required", "#/required"),
        ({"minItems": "2"}, "minItems", "#/minItems"),
        ({"minimun": 2}, "minimun", "#/minimun"),
        ({"x-guidance": {"whitespace_flexible": False}}, "x-guidance", "#/x-guidance"),
    ],
)
def test_a_refusal_names_keyword_and_place(schema, keyword, place):
    error = refused(schema)
    assert error.what.startswith(f"response_format: {keyword} at {place} ")
    assert error.kind == "unsupported"


@pytest.mark.parametrize("schema", [False, [], "x", {"type": "object", "properties": {"a": 5}}])
def test_what_is_no_schema(schema):
    assert refused(schema).kind in ("invalid", "unsupported")


def test_sizes_have_limits():
    deep = {}
    for _ in range(100):
        deep = {"items": deep}
    assert "too large" in refused(deep).why
    assert "bytes" in refused({"description": "x" * MAX_BYTES}).why
    nest = {}
    for _ in range(5000):
        nest = {"items": nest}
    assert refused(nest).why


def test_two_conditions_that_cannot_hold_together_are_refused():
    refused({"type": "integer", "minimum": 5, "maximum": 3})


def test_one_of_branches_that_exclude_one_another():
    shapes = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    branch = {"type": "object", "required": ["kind"], "additionalProperties": False}
    defs = {name: {**branch, "properties": {"kind": {"const": name}}} for name in "ab"}
    grammar = whole_grammar([json_grammar({"oneOf": shapes, "$defs": defs}, "f")], None, "closed")
    assert [accepts(grammar, f'{{"kind": "{kind}"}}') for kind in "abc"] == [True, True, False]
    defs["b"]["properties"]["kind"] = {"enum": ["a", "b"]}
    grammar = whole_grammar([json_grammar({"oneOf": shapes, "$defs": defs}, "f")], None, "closed")
    assert [accepts(grammar, f'{{"kind": "{kind}"}}') for kind in "abc"] == [False, True, False]


def test_annotations_are_left_out_and_change_nothing():
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    noted = json.loads(json.dumps(plain))
    noted |= dict.fromkeys(ANNOTATIONS, "<b>\n" * 1000) | {"x-order": 3}
    noted["properties"]["a"]["description"] = '"quotes" </tool_call>'
    assert json_grammar(noted, "f") == json_grammar(plain, "f")
    assert not ANNOTATIONS & FIRST_CLASS


THINK = ReasoningSyntax("<think>", "</think>")


def accepts(grammar, text):
    """Whether the output ``text`` is whole, by bytes."""
    from atlas_core.engine.grammar import _table

    class Bytes:
        special_ids = frozenset({256})
        vocab_size = 257

        def token_bytes(self, token):
            return bytes([token]) if token < 256 else b"<eos>"

        def encode(self, text, **options):
            return list(text.encode())

    matcher = LLMatcher(_table(Bytes(), (256,), 257, frozenset()), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


CALL = '<tool_call>\n{"name": "a.b-c", "arguments": {"x": 1}}\n</tool_call>'


def tools(description):
    parameters = {"type": "object", "properties": {"x": {"type": "integer", "description": description}}, "required": ["x"],
                  "additionalProperties": False}  # fmt: skip
    return [
        Tool("a.b-c", parameters),
        Tool('q"', {"$ref": "#/$defs/E", "$defs": {"E": {"type": "object"}}}),
        Tool("none", {}),
    ]


def test_calls_that_are_forced():
    lark = forced.hermes(tools("x"), True)
    assert lark == forced.hermes(tools('quotes " and <angles>\n' * 300), True)
    whole = whole_grammar([lark], None, "closed")
    assert accepts(whole, CALL)
    assert accepts(whole, f"{CALL}\n{CALL}")
    assert accepts(whole, '<tool_call>\n{"name": "q\\"", "arguments": {}}\n</tool_call>')
    assert not accepts(whole, CALL.replace("1", '"1"'))
    assert not accepts(whole, "Sure. " + CALL)
    single = whole_grammar([forced.hermes(tools("x"), False)], None, "closed")
    assert not accepts(single, f"{CALL}\n{CALL}")
    either = whole_grammar([lark, json_grammar({"type": "boolean"}, "f")], None, "closed")
    assert accepts(either, "true")
    assert accepts(either, CALL)
    bare = whole_grammar([forced.bare(tools("x"), True, key="parameters")], None, "closed")
    assert accepts(bare, '{"name": "a.b-c", "parameters": {"x": 1}}; {"name": "none", "parameters": {}}')


QWEN = (
    "<tool_call>\n<function=edit>\n<parameter=path>\nx y\n\n</parameter>\n<parameter=mode>\nw\n</parameter>\n<parameter=lines>\n[1, 2]\n"
    "</parameter>\n</function>\n</tool_call>"
)
EDIT = {
    "type": "object", "required": ["path", "mode"],
    "properties": {"path": {"type": "string"}, "mode": {"type": "string", "enum": ["r", "w"]}, "lines": {"$ref": "#/$defs/L"}},
    "$defs": {"L": {"type": "array", "items": {"type": "integer"}}},
}  # fmt: skip


def test_calls_in_tags_that_are_forced():
    whole = whole_grammar(
        [forced.tagged([Tool("edit", EDIT), Tool("ping", {})], True, tags=QWEN3_CODER)], None, "closed"
    )
    assert accepts(whole, QWEN)
    assert accepts(whole, QWEN + "\n<tool_call>\n<function=ping>\n</function>\n</tool_call>")
    assert accepts(whole, QWEN.replace("<parameter=lines>\n[1, 2]\n</parameter>\n", ""))
    assert not accepts(whole, QWEN.replace("\nw\n", "\na\n"))
    assert not accepts(whole, QWEN.replace("[1, 2]", '["1"]'))
    assert not accepts(whole, QWEN.replace("<parameter=path>\nx y\n\n</parameter>\n", ""))
    minimax = whole_grammar([forced.tagged([Tool("edit", EDIT)], False, tags=MINIMAX)], None, "closed")
    text = '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">x</parameter>\n<parameter name="mode">r</parameter>\n</invoke>\n</minimax:tool_call>'
    assert accepts(minimax, text)
    for schema, keyword in (({"type": "string", "maxLength": 3}, "maxLength"), ({"type": "integer", "not": {}}, "not")):
        with pytest.raises(RequestError) as caught:
            forced.tagged([Tool("f", {"properties": {"a": schema}})], True, tags=QWEN3_CODER)
        assert keyword in caught.value.what
    mistral = whole_grammar([forced.mistral(tools("x"), True)], None, "closed")
    assert accepts(mistral, '[TOOL_CALLS]a.b-c[ARGS]{"x": 1}[TOOL_CALLS]none[ARGS]{}')


@pytest.mark.parametrize(
    ("state", "text", "good"),
    [
        ("open", "hm {}</think>\n\ntrue", True), ("open", "</think>true", True), ("open", "true", False),
        ("unsaid", "<think>x</think>true", True), ("unsaid", "true", True), ("unsaid", "x</think>true", False),
        ("closed", "true", True), ("closed", "<think>x</think>true", False), ("open", "x</think>\n\n\n\n\n\n\ntrue", False),
    ],
)  # fmt: skip
def test_a_thought_stands_before_the_form(state, text, good):
    assert accepts(whole_grammar([json_grammar({"type": "boolean"}, "f")], THINK, state), text) is good


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(sorted(FIRST_CLASS | {"not", "if"})) | st.text(max_size=3), inner, max_size=4))  # fmt: skip


@given(schema=JSON)
def test_any_value_is_a_schema_or_refused(schema):
    try:
        check(whole_grammar([json_grammar(schema, "f")], None, "closed"), "f")
    except RequestError as error:
        assert error.field == "f"
