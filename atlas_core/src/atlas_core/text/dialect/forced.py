"""Lark grammars of answers that are calls and nothing else, for ``tool_choice`` required and named."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from atlas_core.contracts.dialect import Tool
from atlas_core.text.dialect.tags import Tags
from atlas_core.text.dialect.typed import parameter_schema, types
from atlas_core.text.grammar import json_rule
from atlas_core.vocab.errors import RequestError

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_STRING_LIMITS = ("pattern", "minLength", "maxLength", "format")


def hermes(tools: Sequence[Tool], parallel: bool) -> str:
    """One or more tagged objects."""
    calls = [_object(tool, "arguments", index) for index, tool in enumerate(tools)]
    return _grammar(calls, '"<tool_call>\\n" call "\\n</tool_call>"', r'"\n"', parallel)


def bare(tools: Sequence[Tool], parallel: bool, *, key: str) -> str:
    """One or more objects, divided by ``;`` and a blank."""
    return _grammar([_object(tool, key, index) for index, tool in enumerate(tools)], "call", '"; "', parallel)


def mistral(tools: Sequence[Tool], parallel: bool) -> str:
    """One or more names with their arguments."""
    calls = [
        f"{_text(f'[TOOL_CALLS]{tool.name}[ARGS]')} {_json(tool.parameters, index)}" for index, tool in enumerate(tools)
    ]
    return _grammar(calls, "call", '""', parallel)


def tagged(tools: Sequence[Tool], parallel: bool, *, tags: Tags) -> str:
    """One or more calls in tags: required parameters and optional ones, in the order of ``properties``.

    Raises RequestError for what bare text cannot be held to: limits of strings, and names that would end a tag.
    """
    opening, closing = (_text(text) for text in (f"{tags.opening[0]}\n", f"\n{tags.closing[0]}"))
    calls, rules = [], []
    for index, tool in enumerate(tools):
        parts = [_text(f"{tags.call[0]}{tool.name}{tags.call[1]}\n")]
        required = tool.parameters.get("required")
        properties = tool.parameters.get("properties")
        for number, name in enumerate(properties if isinstance(properties, Mapping) else ()):
            parameter = f"parameter_{index}_{number}"
            rules += _parameter(tool, name, parameter, tags, f"tools[{index}].function.parameters")
            parts.append(parameter if isinstance(required, list) and name in required else f"{parameter}?")
        calls.append(" ".join([*parts, _text(tags.call[2])]))
    return _grammar(calls, f"{opening} call {closing}", r'"\n"', parallel) + "".join(f"{rule}\n" for rule in rules)


def _parameter(tool: Tool, name: str, rule: str, tags: Tags, field: str) -> list[str]:
    schema = parameter_schema(tool.parameters, name)
    schema = schema if isinstance(schema, Mapping) else {}
    around = "\n" if tags.layout else ""
    if any(char in name for char in '<>\n"'):
        raise _unenforceable(field, f"properties/{name[:64]}", "the name cannot stand in a tag")
    head = _text(f"{tags.parameter[0]}{name}{tags.parameter[1]}{around}")
    tail = _text(f"{around}{tags.parameter[2]}\n")
    if "string" not in types(schema, tool.parameters):
        # Definitions stay with the root, so that references find them.
        roots = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        return [f"{rule}: {head} {json_rule({**roots, **schema}, f'{field}.properties.{name}')} {tail}"]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = " | ".join(_text(value if isinstance(value, str) else json.dumps(value)) for value in values)
        return [f"{rule}: {head} ({texts}) {tail}"]
    for keyword in _STRING_LIMITS:
        if keyword in schema:
            raise _unenforceable(field, f"properties/{name}/{keyword}", "values of this dialect are bare text")
    return [f'{rule}: {head} {rule}_value "\\n"', f"{rule}_value[suffix={_text(tags.parameter[2])}]: /(?s:.*)/"]


def _grammar(calls: Sequence[str], whole: str, between: str, parallel: bool) -> str:
    lines = [
        "%llguidance {}",
        f"start: tagged ({between} tagged)*" if parallel else "start: tagged",
        f"tagged: {whole}",
    ]
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls))))
    return "\n".join([*lines, *(f"call_{index}: {call}" for index, call in enumerate(calls))]) + "\n"


def _object(tool: Tool, key: str, index: int) -> str:
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
    return f'{_text(head)} {_json(tool.parameters, index)} "}}"'


def _json(parameters: Mapping[str, Any], index: int) -> str:
    return json_rule(parameters or _NO_ARGUMENTS, f"tools[{index}].function.parameters")


def _text(text: str) -> str:
    """``text`` as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _unenforceable(field: str, place: str, why: str) -> RequestError:
    return RequestError(
        f"{field}: #/{place} cannot be enforced", why, "set tool_choice to auto", kind="unsupported", field=field,
        code="unsupported_schema",
    )  # fmt: skip
