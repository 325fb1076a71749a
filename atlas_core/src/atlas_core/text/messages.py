"""Chat messages brought into the shape that templates of checkpoints expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from atlas_core.vocab.errors import RequestError

Message = dict[str, Any]
_SYSTEM = ("system", "developer")


class TemplateAbilities(Struct, frozen=True):
    """What one template can take; found out by rendering probes.

    ``content_parts``: content as a list of typed parts. ``object_arguments``: a call's arguments as an object, not as
    JSON text. ``developer_role``: the role ``developer`` is known by name. ``late_system``: system messages are
    printed where they stand; many templates drop or refuse all but the first, or print all at the beginning.
    ``parallel_calls``: an answer may have several. ``null_content``: calls are printed only where there is no
    content, not even an empty one.
    """

    content_parts: bool
    object_arguments: bool
    developer_role: bool
    late_system: bool
    parallel_calls: bool
    null_content: bool


def normalise(messages: Sequence[Mapping[str, Any]], abilities: TemplateAbilities) -> list[Message]:
    """Copies of ``messages`` for a template of these abilities.

    Arguments of calls become objects (``""`` is ``{}``), or JSON text where the template wants that. Text parts are
    joined without a separator where it wants a string, and in all turns but the user's. Content that is null is the
    empty string, an empty or null ``tool_calls`` is no field, and ``developer`` is ``system`` to a template that has
    never heard of it. Where only one system message is printed, or all at the beginning, later ones stay in their
    place as part of what stands before them: the system message, a user's turn, the result of a tool; behind an
    answer they are said by the user. Where an answer has one call at most, further ones become answers of their own,
    each with its result behind it. Raises RequestError naming the field.
    """
    if not messages:
        raise RequestError(
            "there are no messages", "a conversation has at least one turn", "send one", field="messages"
        )
    turns = [_message(message, f"messages[{index}]", abilities) for index, message in enumerate(messages)]
    if not abilities.parallel_calls:
        turns = _with_single_calls(turns)
    if abilities.null_content:
        turns = [{**turn, "content": turn["content"] or None} if turn.get("tool_calls") else turn for turn in turns]
    return turns if abilities.late_system else _with_one_system(turns)


def _with_single_calls(turns: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    place = 0
    while place < len(turns):
        turn = turns[place]
        end = next((n for n in range(place + 1, len(turns)) if turns[n]["role"] != "tool"), len(turns))
        calls, results = turn.get("tool_calls") or (), list(turns[place + 1 : end])
        if len(calls) < 2:
            found += turns[place:end]
        else:
            for number, call in enumerate(calls):
                said = {**turn, "tool_calls": [call]}
                mine = [result for result in results if result.get("tool_call_id") == call.get("id")][:1]
                found += [said if number == 0 else {"role": turn["role"], "content": "", "tool_calls": [call]}, *mine]
                results = [result for result in results if not any(result is one for one in mine)]
            found += results
        place = end
    return found


def _with_one_system(turns: Sequence[Message]) -> list[Message]:
    """Later system messages become part of the turn before them, or of the user's after an answer, since turns may have to alternate."""
    found: list[Message] = []
    moved = False
    for turn in turns:
        before = found[-1]["role"] if found else None
        late = turn["role"] in _SYSTEM and before is not None
        if (late and before != "assistant") or (moved and turn["role"] == "user"):
            found[-1] = {**found[-1], "content": _joined(found[-1]["content"], turn["content"])}
            moved = moved and late
        else:
            found.append({**turn, "role": "user"} if late else turn)
            moved = late
    return found


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else [*each] for each in (first, second)]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]


def _message(message: Mapping[str, Any], field: str, abilities: TemplateAbilities) -> Message:
    out = dict(message)
    role = out.get("role")
    if not isinstance(role, str):
        raise RequestError(
            f"{field} has no role", "every turn belongs to somebody", "add a role", field=f"{field}.role"
        )
    if role == "developer" and not abilities.developer_role:
        out["role"] = "system"
    content = out.get("content")
    # Templates that take parts take them from users; in other turns many print them as they are, or as several results.
    parts = abilities.content_parts and (role == "user" or not _only_text(content))
    out["content"] = "" if content is None else _content(content, f"{field}.content", parts=parts)
    calls = out.get("tool_calls")
    if calls:
        out["tool_calls"] = [_call(call, f"{field}.tool_calls[{n}]", abilities) for n, call in enumerate(calls)]
    else:
        out.pop("tool_calls", None)
    return out


def _only_text(content: Any) -> bool:
    parts = content if isinstance(content, list | tuple) else ()
    return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)


def _content(content: Any, field: str, *, parts: bool) -> Any:
    if isinstance(content, str) or parts:
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{field} is neither a string nor a list of parts",
            f"it is {type(content).__name__}",
            "send text",
            field=field,
        )
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"{field}[{index}] is not a text part",
                f"it is {kind!r}, and this model's template takes text only",
                "send parts of type text",
                kind="unsupported",
                field=f"{field}[{index}]",
            )
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Mapping[str, Any], field: str, abilities: TemplateAbilities) -> Message:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(
            f"{field} has no function", "a call names the function it calls", "add it", field=f"{field}.function"
        )
    arguments = _arguments(function.get("arguments"), f"{field}.function.arguments")
    value = arguments if abilities.object_arguments else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": value}}


def _arguments(value: Any, field: str) -> Mapping[str, Any]:
    parsed = value
    if value is None or value == "":
        parsed = {}
    elif isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{field} is not JSON",
                str(error),
                "send the arguments of the call as the model wrote them",
                field=field,
            ) from None
    if not isinstance(parsed, Mapping):
        raise RequestError(
            f"{field} is not an object", f"it is {type(parsed).__name__}", "send a JSON object", field=field
        )
    return parsed
