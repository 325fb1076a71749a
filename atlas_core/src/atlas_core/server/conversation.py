"""The messages and tools of a request: their shape is checked here, and the rest of the server may rely on it. Pure."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from atlas_core.contracts.dialect import Tool
from atlas_core.server.schema import ChatRequest
from atlas_core.vocab.errors import RequestError

ROLES = ("developer", "system", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning")
"""Names under which clients send a thought back."""
TOOL_NAME = re.compile(r"[^\s<>{}\[\]\"'`\\]{1,256}")
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ToolUse(Struct, frozen=True):
    """What a request says about tools.

    ``declared`` are those that the chat template is told of, ``tools`` the same for parsers. ``forced``: the answer must be a call;
    ``named``: of the one tool that was named. ``parallel``: it may be several.
    """

    declared: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Tool, ...] = ()
    forced: bool = False
    named: bool = False
    parallel: bool = True


def tool_use(request: ChatRequest) -> ToolUse:
    """The tools that may be called. Raises RequestError that names the field."""
    declared = declared_tools(request.tools or ())
    choice = request.tool_choice if request.tool_choice is not None else "auto"
    if choice == "none" or (choice == "auto" and not declared):
        return ToolUse()
    if not declared:
        raise _invalid("tool_choice", "there are no tools to choose from")
    forced, wanted, named = _choice(choice)
    names = [tool["function"]["name"] for tool in declared]
    for name in wanted or ():
        if name not in names:
            raise _invalid("tool_choice", f"there is no tool {name[:64]!r}; there are {', '.join(names)[:512]}")
    left = [tool for tool in declared if wanted is None or tool["function"]["name"] in wanted]
    tools = tuple(Tool(tool["function"]["name"], tool["function"]["parameters"]) for tool in left)
    return ToolUse(tuple(left), tools, forced, named, request.parallel_tool_calls is not False)


def declared_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``tools`` with what templates rely on. Raises RequestError for a tool that is no function, or has no name of its own."""
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        kind = tool.get("type", "function")
        if kind != "function":
            raise RequestError(
                f"{field} is of type {str(kind)[:64]}", "the model calls functions only", "declare a function",
                kind="unsupported", field=f"{field}.type", code="unsupported_tool",
            )  # fmt: skip
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _invalid(f"{field}.function", "it is no object")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise _invalid(
                f"{field}.function.name", "it is no name of up to 256 characters without blanks, quotes and brackets"
            )
        if any(name == other["function"]["name"] for other in found):
            raise _invalid(f"{field}.function.name", f"there is another tool {name!r}")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise _invalid(f"{field}.function.parameters", "it is no JSON schema of an object")
        found.append(
            {**tool, "type": "function", "function": {**function, "parameters": parameters or dict(_NO_ARGUMENTS)}}
        )
    return found


def _choice(choice: str | Mapping[str, Any]) -> tuple[bool, list[str] | None, bool]:
    """(whether a call is forced, the names that are allowed, whether one was named)."""
    if choice in ("auto", "required"):
        return choice == "required", None, False
    if not isinstance(choice, Mapping):
        raise _invalid("tool_choice", "it is none of none, auto, required and an object")
    if choice.get("type") == "function":
        return True, [_function_name(choice, "tool_choice")], True
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
            raise _invalid("tool_choice.allowed_tools.mode", "it is neither auto nor required")
        tools = allowed.get("tools")
        if not isinstance(tools, list) or not tools:
            raise _invalid("tool_choice.allowed_tools.tools", "it names no tool")
        names = [_function_name(tool, f"tool_choice.allowed_tools.tools[{n}]") for n, tool in enumerate(tools)]
        return allowed["mode"] == "required", names, False
    raise _invalid("tool_choice.type", "it is neither function nor allowed_tools")


def _function_name(value: Any, field: str) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _invalid(f"{field}.function.name", "it is no string")
    return name


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Roles, contents, calls and thoughts. Raises RequestError that names the field; the chat template may refuse further things."""
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                f"{place}.role is not valid", f"it is {str(role)[:64]!r}", f"use one of {', '.join(ROLES)}",
                field=f"{place}.role", code="invalid_value",
            )  # fmt: skip
        content = message.get("content")
        if content is None and role != "assistant":
            raise _invalid(f"{place}.content", "it is missing")
        if content is not None and not isinstance(content, str | list):
            raise _invalid(f"{place}.content", "it is neither a string nor a list of parts")
        for part, value in enumerate(content if isinstance(content, list) else ()):
            _check_part(value, f"{place}.content[{part}]")
        _check_calls(message.get("tool_calls"), f"{place}.tool_calls")
        for name in REASONING:
            if not isinstance(message.get(name), str | None):
                raise _invalid(f"{place}.{name}", "it is no string")


def _check_part(part: Any, field: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _invalid(field, "it is no object with a type")
    if kind != "text":
        raise RequestError(
            f"{field} is of type {kind[:64]}", "this model takes text only", "send parts of type text", kind="unsupported",
            field=field, code="unsupported_content",
        )  # fmt: skip
    if not isinstance(part.get("text"), str):
        raise _invalid(f"{field}.text", "it is no string")


def with_ids(messages: Sequence[Mapping[str, Any]], length: int) -> list[Mapping[str, Any]]:
    """Copies in which ids of calls are ``length`` letters and digits, as the template insists, also those that others chose."""
    return [_with_ids(message, length) for message in messages] if length else list(messages)


def _with_ids(message: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    found = dict(message)
    if found.get("tool_calls"):
        found["tool_calls"] = [{**call, "id": _fitting(call.get("id"), length)} for call in found["tool_calls"]]
    if "tool_call_id" in found:
        found["tool_call_id"] = _fitting(found["tool_call_id"], length)
    return found


def _fitting(call_id: Any, length: int) -> Any:
    if not isinstance(call_id, str) or re.fullmatch(f"[a-zA-Z0-9]{{{length}}}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:length]


def with_failures(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Copies in which the result of a tool that failed (``is_error``) says so: no template would."""
    return [_failed(message) if message.get("is_error") is True else message for message in messages]


def _failed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content, rest = message["content"], {name: value for name, value in message.items() if name != "is_error"}
    said = "Error: " if content else "Error"
    return {
        **rest,
        "content": said + content if isinstance(content, str) else [{"type": "text", "text": said}, *content],
    }


def with_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Copies in which a thought stands under both names that templates know."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        thought = next((message[name] for name in REASONING if message.get(name)), None)
        bare = {name: value for name, value in message.items() if name not in REASONING}
        found.append(bare if thought is None else {**bare, **dict.fromkeys(REASONING, thought)})
    return found


def _check_calls(calls: Any, field: str) -> None:
    if calls is not None and not isinstance(calls, list):
        raise _invalid(field, "it is not a list of calls")
    for index, call in enumerate(calls or ()):
        place = f"{field}[{index}]"
        if not isinstance(call, dict):
            raise _invalid(place, "it is no object")
        if call.get("type", "function") != "function":
            raise RequestError(
                f"{place} is of type {str(call['type'])[:64]}", "the model calls functions only", "send calls of functions",
                kind="unsupported", field=f"{place}.type", code="unsupported_tool",
            )  # fmt: skip
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _invalid(f"{place}.function.name", "it is no string")


def _invalid(field: str, why: str) -> RequestError:
    return RequestError(f"{field} is not valid", why, "", field=field, code="invalid_value")
