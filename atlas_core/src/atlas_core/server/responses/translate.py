"""From items to the conversation that the chat template is given. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_core.server.responses.items import invalid, text_of, thought_of
from atlas_core.server.responses.schema import InputRequest, ResponsesRequest
from atlas_core.server.responses.tools import Tools, chat_choice, custom_arguments, offered_name
from atlas_core.server.schema import ChatRequest
from atlas_core.server.store.port import Item
from atlas_core.vocab.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
_CHAT = {
    "response_format.json_schema": "text.format", "response_format": "text.format", "messages": "input",
    "max_tokens": "max_output_tokens", "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools": "tool_choice",
}  # fmt: skip
"""Fields of the chat endpoint, and what they are called here; the first that fits counts."""
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop",
    "ignore_eos", "min_tokens", "stream", "cache_salt",
)  # fmt: skip
"""Fields that mean the same to both endpoints."""


def chat_request(request: InputRequest, items: Sequence[Item], tools: Tools) -> ChatRequest:
    """``request``, which asks for an answer to ``items``, as the chat endpoint would have it. Raises RequestError."""
    messages = conversation(items, request.instructions)
    if not messages:
        raise RequestError(
            "there is nothing to answer", "neither input nor an earlier turn is given", "send input", field="input",
            code="missing_field",
        )  # fmt: skip
    choice = chat_choice(request.tool_choice, tools)
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=list(tools.declared),
        # Where every tool was left out, the free choice among them is a choice of none.
        tool_choice="none" if choice == "auto" and not tools.declared else choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text.format if request.text else None),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        thinking_token_budget=request.thinking_token_budget,
        verbosity=request.text.verbosity if request.text else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    if isinstance(request, ResponsesRequest):
        for name in _SAME:
            setattr(chat, name, getattr(request, name))
        chat.max_completion_tokens = request.max_output_tokens
        if LOGPROBS in (request.include or ()) or request.top_logprobs:
            chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    return chat


def conversation(items: Sequence[Item], instructions: str | None = None) -> list[dict[str, Any]]:
    """Messages for the chat template: ``instructions`` first, then the items, of which those of one answer become one message.

    What the system and the developer say before everybody else becomes one message too, since many templates take only one, at the
    beginning. A call that was cut off is left out: nobody can have run it.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "message":
                _add_message(messages, item)
            case "reasoning":
                _add_thought(messages, thought_of(item))
            case "function_call" | "custom_tool_call" if item["status"] != "incomplete":
                custom = item["type"] == "custom_tool_call"
                arguments = custom_arguments(item["input"]) if custom else item["arguments"]
                function = {"name": offered_name(item["name"], item.get("namespace")), "arguments": arguments}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _answer(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                output = item["output"]
                text = output if isinstance(output, str) else text_of(output)
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    return messages


def later_beginnings(items: Sequence[Item]) -> list[tuple[Item, ...]]:
    """``items`` without their first turns, without one more each time; what the system says first always stays.

    Turns begin where the user speaks, so that no output loses its call.
    """
    system = 0
    while system < len(items) and items[system].get("role") in ("system", "developer"):
        system += 1
    starts = [place for place, item in enumerate(items) if item.get("role") == "user" and place > system]
    return [(*items[:system], *items[place:]) for place in starts]


def in_own_words(error: RequestError) -> RequestError:
    """``error``, which the chat endpoint's code raised, with the names that fields have here."""
    if error.field is None:
        return error
    found = next(
        (name for name in _CHAT if error.field == name or error.field.startswith((f"{name}.", f"{name}["))), None
    )
    if found is None:
        return error
    what, why, field = (text.replace(found, _CHAT[found]) for text in (error.what, error.why, error.field))
    return RequestError(
        what, why, error.cure, kind=error.kind, field=field, code=error.code, retry_after=error.retry_after
    )


def _add_message(messages: list[dict[str, Any]], item: Item) -> None:
    text, role = text_of(item["content"]), item["role"]
    if role != "assistant":
        if role in ("system", "developer") and len(messages) == 1 and messages[0]["role"] in ("system", "developer"):
            messages[0]["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})
        return
    answer = _answer(messages)
    said = answer.get("content")
    if said is None:
        answer["content"] = text
    elif answer.get("tool_calls"):
        answer["content"] = f"{said}\n{text}"
    else:
        messages.append({"role": "assistant", "content": text})


def _add_thought(messages: list[dict[str, Any]], thought: str) -> None:
    if not thought:
        return
    answer = _answer(messages)
    if answer.get("content") is not None or answer.get("tool_calls") or "reasoning_content" in answer:
        answer = {"role": "assistant", "content": None}
        messages.append(answer)
    answer["reasoning_content"] = thought


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the answer that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") != "json_schema":
        return dict(form)
    if "schema" not in form:
        raise invalid("text.format.schema", "it is missing")
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
