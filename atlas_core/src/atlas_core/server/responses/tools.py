"""The tools of a request, flat, as the chat endpoint spells them. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from atlas_core.server.conversation import TOOL_NAME
from atlas_core.server.responses.items import invalid
from atlas_core.vocab.errors import RequestError

INPUT = "input"
"""The one parameter of the function as which a custom tool is offered."""


Spaces = Mapping[str, tuple[str, str]]
"""The namespace and the name there of functions that stand for a tool in a namespace, by the name that the model is told."""


class Tools(Struct, frozen=True):
    """``declared`` are functions as chat declares them; those named in ``custom`` stand for tools that take free text.

    ``spaces`` has those of namespaces.

    ``skipped`` says which were left out, since no model here can use them.
    """

    declared: tuple[dict[str, Any], ...] = ()
    custom: frozenset[str] = frozenset()
    spaces: Spaces = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def read_tools(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """``tools`` for the chat template. Tools that the server would have to run are left out. Raises RequestError naming the field."""
    declared: list[dict[str, Any]] = []
    custom: set[str] = set()
    spaces: dict[str, tuple[str, str]] = {}
    skipped: list[str] = []
    for place, space, tool in _flat(tools):
        kind = tool.get("type", "function")
        if kind not in ("function", "custom"):
            skipped.append(f"tools of type {str(kind)[:64]}")
            continue
        own = _name(tool, place)
        name = offered_name(own, space)
        if any(name == other["function"]["name"] for other in declared):
            raise invalid(f"{place}.name", f"there is another tool {name!r}")
        if space is not None:
            spaces[name] = space, own
        if kind == "custom":
            custom.add(name)
        function = _custom(tool, place) if kind == "custom" else _function(tool, place)
        declared.append({"type": "function", "function": {"name": name, **function}})
    return Tools(tuple(declared), frozenset(custom), spaces, tuple(skipped))


def offered_name(name: str, space: str | None) -> str:
    """What the model is told that a tool is called."""
    return name if space is None else f"{space}__{name}"


def _flat(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """(place, namespace, tool) of every tool, those in namespaces included."""
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield place, None, tool
            continue
        space, inside = _name(tool, place), tool.get("tools")
        if not isinstance(inside, list):
            raise invalid(f"{place}.tools", "it is no list of tools")
        for number, each in enumerate(inside):
            if not isinstance(each, Mapping):
                raise invalid(f"{place}.tools[{number}]", "it is no object")
            yield f"{place}.tools[{number}]", space, each


def _name(tool: Mapping[str, Any], place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise invalid(f"{place}.name", "it is no name of up to 256 characters without blanks, quotes and brackets")
    return name


def chat_choice(choice: str | Mapping[str, Any] | None, tools: Tools) -> str | dict[str, Any]:
    """``tool_choice`` as the chat endpoint spells it. Raises RequestError for a tool that could not be offered."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _wanted(choice, "tool_choice")}}
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        if not isinstance(allowed, list) or not allowed:
            raise invalid("tool_choice.tools", "it names no tool")
        mode = choice.get("mode")
        if mode not in ("auto", "required"):
            raise invalid("tool_choice.mode", "it is neither auto nor required")
        names = [
            _wanted(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(allowed)
            if not isinstance(tool, Mapping) or tool.get("type", "function") in ("function", "custom")
        ]  # fmt: skip
        if names:
            functions = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
        if mode == "auto":
            # Only tools that are not offered at all may be called.
            return "none"
    raise RequestError(
        "tool_choice asks for a tool that is not offered", f"{str(kind)[:64]} is nothing that the model here can call",
        "choose among tools of the types function and custom", kind="unsupported", field="tool_choice",
        code="unsupported_parameter",
    )  # fmt: skip


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _function(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid(f"{field}.parameters", "it is no JSON schema of an object")
    found = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {**found, "parameters": parameters or {"type": "object", "properties": {}}}


def _custom(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    description = tool.get("description") or ""
    if not isinstance(description, str):
        raise invalid(f"{field}.description", "it is no string")
    form = tool.get("format")
    if form is not None and not isinstance(form, Mapping):
        raise invalid(f"{field}.format", "it is no object")
    if form and isinstance(form.get("definition"), str):
        # The grammar is told, not enforced: it is about the text inside of an argument.
        description += f"\n\nThe input follows this {form.get('syntax', '')} grammar:\n{form['definition']}"
    return {
        "description": description.strip(),
        "parameters": {
            "type": "object", "properties": {INPUT: {"type": "string", "description": "The whole input of the tool."}},
            "required": [INPUT], "additionalProperties": False,
        },
    }  # fmt: skip


def _wanted(tool: Any, field: str) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    if not isinstance(name, str):
        raise invalid(f"{field}.name", "it is no string")
    return name
