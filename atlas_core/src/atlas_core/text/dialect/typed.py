"""Values that a model wrote as bare text, turned into JSON by the schema of the parameter."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Sink = Callable[[str], None]

_ANY = frozenset({"string", "object", "array"})
"""What a value without a declared type may be: text, unless it is plainly a structure."""
_DEPTH = 32
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,4000}(\.0*)?\s*")
_NUMBER = re.compile(r"\s*[+-]?([0-9]{1,4000}\.?[0-9]{0,4000}|\.[0-9]{1,4000})([eE][+-]?[0-9]{1,4})?\s*")


def parameter_schema(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of one parameter; ``{}`` when it is not declared."""
    properties = schema.get("properties")
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that ``schema`` admits, through references, unions and enumerations; those of ``{}`` are text or a structure."""
    return frozenset(_types(schema, root, _DEPTH)) or _ANY


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    if schema.get("nullable") is True:
        yield "null"
    if declared is not None:
        return
    if isinstance(schema.get("$ref"), str):
        yield from _types(_target(schema["$ref"], root), root, depth - 1)
    for union in ("anyOf", "oneOf", "allOf"):
        for part in schema[union] if isinstance(schema.get(union), list) else ():
            yield from _types(part, root, depth - 1)
    for value in (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else ()
    ):
        yield _type_of(value)
    if "properties" in schema:
        yield "object"
    if "items" in schema:
        yield "array"


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    if not reference.startswith("#"):
        return {}
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def to_json(text: str, admitted: frozenset[str]) -> str:
    """``text`` as JSON of one of the types ``admitted``; a value that fits none of them is a string, so that no call is lost."""
    bare = text.strip()
    if "null" in admitted and bare == "null":
        return "null"
    if "boolean" in admitted and bare.lower() in ("true", "false"):
        return bare.lower()
    if "integer" in admitted and _INTEGER.fullmatch(text):
        return str(int(bare.partition(".")[0]))
    if "number" in admitted and _NUMBER.fullmatch(text):
        return _number(bare)
    if admitted & {"object", "array"}:
        found = _structure(bare)
        if found is not None:
            return found
    return quoted(text)


def quoted(text: str) -> str:
    """``text`` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _number(text: str) -> str:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        return quoted(text)
    return str(int(text)) if text.lstrip("+-").isdecimal() else json.dumps(value)


def _structure(text: str) -> str | None:
    """An object or array in JSON's or Python's spelling, else None."""
    if not text.startswith(("{", "[")):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            if isinstance(value, dict | list):
                written = json.dumps(value, ensure_ascii=False, allow_nan=False)
                written.encode()  # half a surrogate pair cannot be sent
                return written
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


class Value:
    """A value that grows: strings are passed on as they come, anything else once it is whole."""

    def __init__(self, admitted: frozenset[str], sink: Sink) -> None:
        self._admitted = admitted
        self._sink = sink
        self._held = ""
        self._streaming = False

    def add(self, text: str) -> None:
        """A piece of it."""
        if self._streaming:
            self._sink(quoted(text)[1:-1])
            return
        self._held += text
        # A string that may also be null is one as soon as it cannot be "null" any more.
        if self._admitted == {"string"} or (
            self._admitted == {"string", "null"} and not "null".startswith(self._held.strip())
        ):
            self._streaming = True
            self._sink('"' + quoted(self._held)[1:-1])

    def close(self) -> None:
        """It is whole."""
        self._sink('"' if self._streaming else to_json(self._held, self._admitted))

    def cut(self) -> None:
        """It breaks off: what is held is passed on as far as that makes sense."""
        if not self._streaming and self._held:
            self._sink('"' + quoted(self._held)[1:-1])
