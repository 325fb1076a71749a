"""Items of an input: brought into one shape, in which they are kept and read. Pure."""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atlas_core.server.store.port import Item
from atlas_core.vocab.errors import RequestError

NewId = Callable[[str], str]
"""A fresh id that begins with the given letters."""

ROLES = ("developer", "system", "user", "assistant")
PREFIXES: Mapping[str, str] = {
    "message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_",
    "custom_tool_call": "ctc_", "custom_tool_call_output": "ctco_", "item_reference": "ref_",
}  # fmt: skip
"""The kinds of items that are read, with what their ids begin with."""

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_SEAL = "atlas-thought:"


def read_items(
    given: str | Sequence[Mapping[str, Any]], field: str, new_id: NewId, taken: frozenset[str] = frozenset()
) -> tuple[list[Item], list[str]]:
    """(the items of ``given``, what was left out because nothing here knows such items).

    Each gets its type, a status, and an id of its own, unless it has one that is not ``taken``. References stay what they are.
    Raises RequestError that names the place below ``field``.
    """
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    items: list[Item] = []
    skipped: list[str] = []
    ids = set(taken)
    for index, item in enumerate(given):
        place = f"{field}[{index}]"
        kind = _kind(item, place)
        if kind not in PREFIXES:
            skipped.append(f"items of type {kind[:64]}")
            continue
        read = _READERS[kind](item, place)
        own = item.get("id")
        keep = isinstance(own, str) and _ID.fullmatch(own) and (own not in ids or kind == "item_reference")
        found = {"id": own if keep else new_id(PREFIXES[kind]), "type": kind, **read}
        ids.add(found["id"])
        items.append(found)
    return items, skipped


def check_outputs(items: Sequence[Item], first: int, field: str) -> None:
    """Every output needs a call before it, and a whole one. Raises RequestError for an output from item ``first`` on that has none."""
    calls: set[str] = set()
    for index, item in enumerate(items):
        if item["type"] in ("function_call", "custom_tool_call") and item["status"] != "incomplete":
            calls.add(item["call_id"])
        elif item["type"].endswith("_output") and item["call_id"] not in calls and index >= first:
            raise RequestError(
                f"{field}[{index - first}].call_id is not valid", f"no whole call before it has the id {item['call_id'][:64]!r}",
                "send the call too, or name the response that made it as previous_response_id",
                field=f"{field}[{index - first}].call_id", code="invalid_value",
            )  # fmt: skip


def seal(thought: str) -> str:
    """A thought as ``encrypted_content``: opaque to clients, which send it back as it is; no secret, only a wrapping."""
    return base64.b64encode((_SEAL + thought).encode()).decode("ascii")


def thought_of(item: Item) -> str:
    """The thought of a reasoning item: its content, else what was sealed here, else its summary."""
    content = "".join(part["text"] for part in item.get("content") or ())
    if content:
        return content
    try:
        opened = base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
    except (binascii.Error, ValueError):
        # Another server's: nobody here can read it.
        opened = ""
    if opened.startswith(_SEAL):
        return opened.removeprefix(_SEAL)
    return "\n\n".join(part["text"] for part in item["summary"])


def is_whole(arguments: str) -> bool:
    """Whether the arguments of a call are a JSON object, and not cut off."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def text_parts(value: Any, field: str, kind: str = "input_text") -> list[dict[str, Any]]:
    """``value``, a string or parts, as parts of text; a string becomes one part of ``kind``."""
    if isinstance(value, str):
        return [_part(kind, value)]
    if not isinstance(value, list):
        raise invalid(field, "it is neither a string nor a list of parts")
    return [_read_part(part, f"{field}[{index}]") for index, part in enumerate(value)]


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """The joined texts of parts; a refusal is text too."""
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


def invalid(field: str, why: str) -> RequestError:
    """400 for a value that cannot be used."""
    return RequestError(f"{field} is not valid", why, "", field=field, code="invalid_value")


def _kind(item: Mapping[str, Any], place: str) -> str:
    kind = item.get("type")
    if kind is None:
        if "role" in item:
            return "message"
        if "id" in item:
            return "item_reference"
    if not isinstance(kind, str):
        raise invalid(f"{place}.type", "it is no string")
    return kind


def _read_part(part: Any, field: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise invalid(field, "it is no object with a type")
    if kind == "refusal":
        return {"type": kind, "refusal": _string(part, "refusal", field)}
    if kind not in _TEXTS:
        raise RequestError(
            f"{field} is of type {kind[:64]}", "this model takes text only", "send parts of type input_text", kind="unsupported",
            field=field, code="unsupported_content",
        )  # fmt: skip
    return _part(kind, _string(part, "text", field))


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{place}.role is not valid", f"it is {str(role)[:64]!r}", f"use one of {', '.join(ROLES)}",
            field=f"{place}.role", code="invalid_value",
        )  # fmt: skip
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "status": "completed", "content": text_parts(item.get("content"), f"{place}.content", kind)}


def _reasoning(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": text_parts(item.get("summary") or [], f"{place}.summary")}
    if item.get("content"):
        found["content"] = text_parts(item["content"], f"{place}.content", "reasoning_text")
    if item.get("encrypted_content"):
        found["encrypted_content"] = _string(item, "encrypted_content", place)
    return found


def _function_call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = _string(item, "arguments", place) or "{}"
    call = _call(item, place)
    if call["status"] == "completed" and not is_whole(arguments):
        raise invalid(f"{place}.arguments", "it is no JSON text of an object")
    return {**call, "arguments": arguments}


def _custom_call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    return {**_call(item, place), "input": _string(item, "input", place)}


def _call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    space = {"namespace": _name(item, "namespace", place)} if item.get("namespace") is not None else {}
    status = "incomplete" if item.get("status") == "incomplete" else "completed"
    return {"call_id": _name(item, "call_id", place), "name": _name(item, "name", place), **space, "status": status}


def _call_output(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    value = item.get("output")
    output = value if isinstance(value, str) else text_parts(value, f"{place}.output")
    return {"call_id": _name(item, "call_id", place), "output": output, "status": "completed"}


def _reference(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _name(item, "id", place)
    return {}


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "message": _message, "reasoning": _reasoning, "function_call": _function_call, "function_call_output": _call_output,
    "custom_tool_call": _custom_call, "custom_tool_call_output": _call_output, "item_reference": _reference,
}  # fmt: skip


def _string(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", "it is missing" if value is None else "it is no string")
    return value


def _name(item: Mapping[str, Any], name: str, place: str) -> str:
    value = _string(item, name, place)
    if not value:
        raise invalid(f"{place}.{name}", "it is empty")
    return value
