"""The page of dialects says what the code says."""

import json
import re
from pathlib import Path

from atlas_core.text.dialect.typed import to_json, types

PAGE = (Path(__file__).parents[3] / "docs" / "dialects.md").read_text()
CORE = (
    "hermes", "qwen3_coder", "qwen3_xml", "mistral", "minimax_xml", "llama3_json", "pythonic", "gemma", "glm4", "deepseek",
    "deepseek_v32", "bare_json", "think", "mistral_think", "seed_think",
)  # fmt: skip
CALLS = {
    "hermes": '`<tool_call>{"name": …, "arguments": …}</tool_call>`',
    "qwen3_coder": "`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`",
    "qwen3_xml": "as `qwen3_coder`",
    "mistral": "`[TOOL_CALLS]name[ARGS]{…}`, `[TOOL_CALLS][{…}]`",
    "minimax_xml": '`<minimax:tool_call><invoke name="…"><parameter name="…">…</parameter></invoke></minimax:tool_call>`',
    "llama3_json": '`{"name": …, "parameters": …}` at the beginning, or behind `<\\|python_tag\\|>`',
    "pythonic": "`[name(key=value)]`",
    "gemma": '`<\\|tool_call>call:name{key:<\\|"\\|>…<\\|"\\|>}<tool_call\\|>`',
    "glm4": "`<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`",
    "deepseek": "`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, and `deepseek_v32`'s",
    "deepseek_v32": '`<｜DSML｜function_calls><｜DSML｜invoke name="…">…`',
    "bare_json": '`{"name": …, "arguments": …}` at the beginning of a line',
}
VALUES = [
    ({"type": "string"}, "00742"), ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "42"),
    ({"type": ["string", "null"]}, "null"), ({"type": "string"}, "null"), ({"type": "boolean"}, "True"), ({"type": "boolean"}, "maybe"),
    ({"type": "integer"}, "next Tuesday"), ({"type": "number"}, "3"), ({"type": "object"}, '{"deep": true}'), ({}, "[1]"), ({}, "123"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42"), ({"type": ["integer", "string"]}, "42"),
    ({"type": ["integer", "string"]}, "00x"),
]  # fmt: skip


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def dialects_table(known) -> str:
    lines = ["| name | calls | a call can be forced | thoughts | models |", "|---|---|---|---|---|"]
    for name in CORE:
        dialect = known[name]
        thoughts = f"`{cell(dialect.reasoning.start.strip())}`" if dialect.reasoning else ""
        forced = "yes" if dialect.tools and dialect.tools.grammar(known["_tools"], parallel=True) else ""
        models = " ".join((type(dialect).__doc__ or "").split()).rstrip(".")
        lines.append(f"| `{name}` | {CALLS.get(name, '')} | {forced} | {thoughts} | {models} |")
    return "\n".join(lines)


def values_table() -> str:
    lines = ["| schema | text | value |", "|---|---|---|"]
    for schema, text in VALUES:
        lines.append(f"| `{json.dumps(schema)}` | `{text}` | `{to_json(text, types(schema, {}))}` |")
    return "\n".join(lines)


def section(name: str) -> str:
    return re.search(rf"<!-- said: {name} -->\n\n?(.*?)(?=\n\n|\Z)", PAGE, re.DOTALL)[1]


def test_the_tables_are_those_of_the_code(kit):
    assert section("dialects") == dialects_table({**kit.known, "_tools": kit.tools[:1]})
    assert section("values") == values_table()


def test_every_core_dialect_is_on_the_page(kit):
    core = {name for name, dialect in kit.known.items() if type(dialect).__module__.startswith("atlas_core.")}
    assert core - {"plain"} == set(CORE)
