"""From a request of this face to the internal form, and from its errors back to the fields that the client knows. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_core.server.messages.schema import (
    CountRequest,
    MessagesRequest,
    ThinkingOptions,
    ToolChoice,
    TranslatedRequest,
)
from atlas_core.server.messages.turns import invalid, read_turns
from atlas_core.vocab.errors import RequestError

"""No chat template knows more than three steps."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "min_tokens", "ignore_eos", "cache_salt",
)  # fmt: skip
_RENAMED = (
    ("continue_final_message", "messages"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("stop", "stop_sequences"),
)
_INSIDE = ((".function.arguments", ".input"), (".function.parameters", ".input_schema"), (".function", ""))


def translate(request: CountRequest) -> tuple[TranslatedRequest, list[str]]:
    """The request in the internal form, and what of it is left out: blocks and tools of unknown types.

    Raises RequestError that names the field.
    """
    turns = read_turns(request.system, request.messages)
    if not turns.messages:
        raise invalid("messages", "nothing of them is left")
    last = turns.messages[-1]
    prefilled = last["role"] == "assistant"
    if prefilled and "tool_calls" in last:
        place = turns.places[f"messages[{len(turns.messages) - 1}]"]
        raise invalid(place, "it calls a tool, and no result follows")
    tools, places, skipped = _tools(request.tools or ())
    thinking = request.thinking
    effort = request.output_config.effort if request.output_config else None
    found = TranslatedRequest(
        model=request.model,
        messages=turns.messages,
        tools=tools or None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        response_format=_format(request),
        reasoning_effort=effort,
        thinking_token_budget=_budget(thinking),
        chat_template_kwargs=_variables(request, thinking),
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        places=turns.places
        | places
        | dict.fromkeys(("response_format.json_schema", "response_format"), _asked_format(request)[1]),
    )
    if isinstance(request, MessagesRequest):
        found.max_tokens, found.stream, found.stop = request.max_tokens, request.stream, request.stop_sequences
        for name in _SAMPLING:
            setattr(found, name, getattr(request, name))
    return found, [*turns.skipped, *skipped]


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
    found: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    skipped: list[str] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        if kind != "custom":
            # Tools that run at Anthropic, and those whose declaration only Claude knows.
            skipped.append(f"tools of type {str(kind)[:64]}")
            continue
        places[f"tools[{len(found)}]"] = f"tools[{index}]"
        function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        if tool.get("input_schema") is not None:
            function["parameters"] = tool["input_schema"]
        found.append({"type": "function", "function": function})
    return found, places, skipped


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise invalid("tool_choice.name", "it is missing")
    return {"type": "function", "function": {"name": choice.name}}


def _asked_format(request: CountRequest) -> tuple[dict[str, Any] | None, str]:
    """The form of the answer, and the field that has it: older clients send one of its own."""
    config = request.output_config
    if config is not None and config.format is not None:
        return config.format, "output_config.format"
    return request.output_format, "output_format"


def _format(request: CountRequest) -> dict[str, Any] | None:
    asked, field = _asked_format(request)
    if asked is None:
        return None
    if asked.get("type") != "json_schema":
        raise invalid(f"{field}.type", "it is not json_schema")
    if "schema" not in asked:
        raise invalid(f"{field}.schema", "it is missing")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked["schema"], "strict": True}}


def _budget(thinking: ThinkingOptions | None) -> int | None:
    if thinking is None:
        return None
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens", "it is missing")
    return {"disabled": 0, "enabled": thinking.budget_tokens}.get(thinking.type)


def _variables(request: CountRequest, thinking: ThinkingOptions | None) -> dict[str, Any] | None:
    """Variables of the template: whoever asks for a thought gets one from a template that has a switch for it."""
    switches = {} if thinking is None or thinking.type == "disabled" else {"enable_thinking": True, "thinking": True}
    return switches | (request.chat_template_kwargs or {}) or None


def in_its_own_words(error: RequestError, places: Mapping[str, str]) -> RequestError:
    """``error`` of the internal form with the fields of the request as it came."""
    field = error.field
    if field is None:
        return error
    name = _original(field, places)
    what, why = (text.replace(field, name) for text in (error.what, error.why))
    return RequestError(
        what, why, error.cure, kind=error.kind, field=name, code=error.code, retry_after=error.retry_after
    )


def _original(field: str, places: Mapping[str, str]) -> str:
    for inner, outer in _RENAMED:
        if field == inner or field.startswith(f"{inner}."):
            return outer + field[len(inner) :]
    known = [place for place in places if field == place or field.startswith((f"{place}.", f"{place}["))]
    if not known:
        return field
    longest = max(known, key=len)
    rest = field[len(longest) :]
    for inner, outer in _INSIDE:
        rest = rest.replace(inner, outer, 1)
    return places[longest] + rest
