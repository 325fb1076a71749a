"""The messages of a request, from Anthropic's blocks to the turns that the rest of the server knows. Pure.

One turn has one text, one thought, and its calls; results of tools are turns of their own. Whatever is refused names
its place in the request; what another part of the server refuses later is led back there by ``places``.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from atlas_core.server.messages.volatile import stable
from atlas_core.vocab.errors import RequestError

ROLES = ("user", "assistant", "system")
Part = dict[str, Any]


class _Turn(Struct):
    """A message of the internal form while it grows; every part and call comes with its place."""

    role: str
    place: str
    parts: list[tuple[Part, str]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[Part, str]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        parts = [part for part, _ in self.parts]
        content: Any = parts
        if all(part["type"] == "text" for part in parts) and (len(parts) < 2 or self.role == "assistant"):
            content = "".join(part["text"] for part in parts)
        found = {"role": self.role, "content": content, **self.more}
        if self.thoughts:
            found["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            found["tool_calls"] = [call for call, _ in self.calls]
        return found


class Turns(Struct):
    """``messages`` in the internal form; ``places`` from their paths to those of the request; ``skipped`` types of blocks."""

    messages: list[dict[str, Any]]
    places: dict[str, str]
    skipped: list[str]


def read_turns(system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]) -> Turns:
    """The conversation of a request.

    Turns of one role that follow one another are one turn. System messages stay where they are. Raises RequestError
    that names the field.
    """
    reader = _Reader()
    if system is not None:
        reader.system(system, "system", "system")
    for index, message in enumerate(messages):
        reader.message(message, f"messages[{index}]")
    return reader.read()


class _Reader:
    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._calls: set[str] = set()
        self._skipped: dict[str, None] = {}

    def read(self) -> Turns:
        places = {}
        for number, turn in enumerate(self._turns):
            places[f"messages[{number}]"] = turn.place
            places |= {f"messages[{number}].content[{at}]": place for at, (_, place) in enumerate(turn.parts)}
            places |= {f"messages[{number}].tool_calls[{at}]": place for at, (_, place) in enumerate(turn.calls)}
        return Turns([turn.message() for turn in self._turns], places, list(self._skipped))

    def message(self, message: Mapping[str, Any], place: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(
                f"{place}.role is not valid", f"it is {str(role)[:64]!r}", f"use one of {', '.join(ROLES)}",
                field=f"{place}.role", code="invalid_value",
            )  # fmt: skip
        if role == "system":
            self.system(content, f"{place}.content", place)
        elif role == "user":
            self._user(content, place)
        else:
            self._assistant(content, place)

    def system(self, content: Any, field: str, place: str) -> None:
        texts = [block["text"] for _, block in self._blocks(content, field, only=("text",))]
        # Blocks of a system prompt are sections: nothing else would keep them apart.
        text = stable("\n\n".join(text for text in map(stable, texts) if text))
        if text:
            self._turns.append(_Turn("system", place, [({"type": "text", "text": text}, field)]))

    def _user(self, content: Any, place: str) -> None:
        blocks = list(self._blocks(content, f"{place}.content"))
        results = [(at, block) for at, block in blocks if block["type"] == "tool_result"]
        for at, block in results:
            self._result(block, at)
        rest = [(at, block) for at, block in blocks if block["type"] != "tool_result"]
        if rest or not results:
            turn = self._open("user", place)
            for at, block in rest:
                turn.parts += self._parts(block, at)

    def _assistant(self, content: Any, place: str) -> None:
        turn = self._open("assistant", place)
        for at, block in self._blocks(content, f"{place}.content"):
            match block["type"]:
                case "thinking":
                    thought = _text(block, "thinking", at)
                    turn.thoughts += [thought] if thought else []
                case "redacted_thinking":
                    continue  # nobody but its author can read it
                case "tool_use":
                    turn.calls.append((self._call(block, at), at))
                case _:
                    turn.parts += self._parts(block, at)

    def _open(self, role: str, place: str) -> _Turn:
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role, place))
        return self._turns[-1]

    def _call(self, block: Mapping[str, Any], place: str) -> Part:
        name, call_id, given = _text(block, "name", place), _text(block, "id", place), block.get("input")
        if not isinstance(given, Mapping):
            raise invalid(f"{place}.input", "it is no object")
        self._calls.add(call_id)
        arguments = json.dumps(given, ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, block: Mapping[str, Any], place: str) -> None:
        call_id = _text(block, "tool_use_id", place)
        if call_id not in self._calls:
            raise invalid(f"{place}.tool_use_id", f"no turn before it has a call with the id {call_id[:64]!r}")
        failed = block.get("is_error")
        if not isinstance(failed, bool | None):
            raise invalid(f"{place}.is_error", "it is no boolean")
        turn = _Turn("tool", place, more={"tool_call_id": call_id} | ({"is_error": True} if failed else {}))
        if block.get("content") is not None:
            for at, inner in self._blocks(block["content"], f"{place}.content"):
                turn.parts += self._parts(inner, at)
        self._turns.append(turn)

    def _parts(self, block: Mapping[str, Any], place: str) -> list[tuple[Part, str]]:
        """What a block shows to the model; none for one of a type that is skipped."""
        match block["type"]:
            case "text":
                return [(_part(_text(block, "text", place)), place)]
            case "image":
                return [
                    ({"type": "image_url", "image_url": {"url": _image(block.get("source"), f"{place}.source")}}, place)
                ]
            case "document":
                return self._document(block, place)
            case "search_result":
                head = f"{_text(block, 'title', place)}\n{_text(block, 'source', place)}\n"
                inner = self._blocks(block.get("content"), f"{place}.content", only=("text",))
                return [(_part(head), place), *((_part(text["text"]), at) for at, text in inner)]
            case "tool_reference":
                return [(_part(f"The tool {_text(block, 'tool_name', place)} is available."), place)]
        self._skipped[f"content of type {block['type'][:64]}"] = None
        return []

    def _document(self, block: Mapping[str, Any], place: str) -> list[tuple[Part, str]]:
        source = block.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping) or not isinstance(kind, str):
            raise invalid(f"{place}.source", "it is no object with a type")
        head = "".join(f"{block[name]}\n" for name in ("title", "context") if isinstance(block.get(name), str))
        found = [(_part(head), place)] if head else []
        match kind:
            case "text":
                return [*found, (_part(_text(source, "data", f"{place}.source")), place)]
            case "content":
                inner = self._blocks(source.get("content"), f"{place}.source.content", only=("text", "image"))
                return [*found, *(part for at, each in inner for part in self._parts(each, at))]
        raise RequestError(
            f"{place}.source is of type {kind[:64]}", "only text can be read", "send the text of the document",
            kind="unsupported", field=f"{place}.source", code="unsupported_content",
        )  # fmt: skip

    def _blocks(self, content: Any, field: str, only: Sequence[str] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(place, block) of each; a text is one block. Blocks of other types than ``only``, if given, are refused."""
        if isinstance(content, str):
            yield field, {"type": "text", "text": content}
            return
        if not isinstance(content, list | tuple):
            raise invalid(field, "it is neither a string nor a list of blocks")
        for index, block in enumerate(content):
            place = f"{field}[{index}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if not isinstance(kind, str):
                raise invalid(place, "it is no object with a type")
            if only and kind not in only:
                raise invalid(f"{place}.type", f"it is {kind[:64]!r}, and only {' and '.join(only)} may stand here")
            if kind == "text":
                _text(block, "text", place)
            yield place, block


def invalid(field: str, why: str) -> RequestError:
    """A field of the wrong kind."""
    return RequestError(f"{field} is not valid", why, "", field=field, code="invalid_value")


def _part(text: str) -> Part:
    return {"type": "text", "text": text}


def _text(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", "it is no string")
    return value


def _image(source: Any, place: str) -> str:
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "base64":
        return f"data:{_text(source, 'media_type', place)};base64,{_text(source, 'data', place)}"
    if kind == "url":
        return _text(source, "url", place)
    if not isinstance(kind, str):
        raise invalid(place, "it is no object with a type")
    raise RequestError(
        f"{place} is of type {kind[:64]}", "this server keeps no files", "send the image itself", kind="unsupported", field=place,
        code="unsupported_content",
    )  # fmt: skip
