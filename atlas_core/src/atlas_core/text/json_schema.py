"""JSON schemas that can be enforced while a text is generated. What cannot is refused, with its keyword and place."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from atlas_core.vocab.errors import RequestError

MAX_BYTES = 1 << 18
"""Of a schema as compact JSON."""
MAX_DEPTH = 64
MAX_NODES = 20_000

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_ONE = frozenset({"items", "additionalProperties"})
_MANY = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset(
    {
        "type", "enum", "const", "required", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties", "$ref",
    }
)  # fmt: skip
ENFORCED = _ONE | _MANY | _NAMED | _VALUES
"""Keywords that generated text is held to."""
ANNOTATIONS = frozenset(
    {
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable",
        "discriminator", "$schema", "$id", "$comment", "contentEncoding", "contentMediaType",
    }
)  # fmt: skip
"""Keywords that say nothing about which values are valid; names that begin with ``x-`` are as harmless, but for one."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_OPTIONS = "x-guidance"
"""Would change how the compiler reads the schema."""


def checked(schema: Any, field: str, pattern_error: Callable[[str], str]) -> dict[str, Any]:
    """A copy of ``schema`` that the compiler enforces fully. ``field`` is its place in the request.

    ``oneOf`` is kept where its branches exclude one another, which makes it ``anyOf``. ``pattern_error`` says what is wrong with a
    regular expression, or nothing. Raises RequestError that names keyword and place.
    """
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        _refuse(field, "", "the schema is no object" if schema is not False else "false admits no value")
    try:
        size = len(json.dumps(schema, separators=(",", ":")))
    except (ValueError, TypeError, RecursionError):
        _refuse(field, "", "it is nested too deeply")
    if size > MAX_BYTES:
        _refuse(field, "", f"it has {size} bytes, and {MAX_BYTES} may be")
    found: dict[str, Any] = _Check(schema, field, pattern_error).copy(schema, "#", 0)
    return found


class _Check:
    def __init__(self, root: Mapping[str, Any], field: str, pattern_error: Callable[[str], str]) -> None:
        self._root = root
        self._field = field
        self._pattern_error = pattern_error
        self._nodes = 0

    def copy(self, schema: Any, path: str, depth: int) -> Any:
        """A checked copy of one schema."""
        if isinstance(schema, bool):
            return schema
        self._nodes += 1
        if not isinstance(schema, Mapping):
            self._fail(path, "", "it is neither an object nor a boolean")
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            self._fail(path, "", "it is too large")
        return {
            target: value
            for key in schema
            for target, value in self._keyword(schema, key, f"{path}/{_escaped(key)}", depth)
        }

    def _keyword(self, schema: Mapping[str, Any], key: str, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        value = schema[key]
        if key in ANNOTATIONS or (key.startswith("x-") and key != _OPTIONS):
            return
        if key not in ENFORCED:
            self._fail(path, key, "generated text cannot be held to it")
        if key in _ONE:
            yield key, self.copy(value, path, depth + 1)
        elif key in _MANY:
            self._demand(isinstance(value, list) and value, path, key, "it is no list of schemas")
            parts = [self.copy(part, f"{path}/{index}", depth + 1) for index, part in enumerate(value)]
            if key == "oneOf":
                self._demand("anyOf" not in schema, path, key, "it stands beside anyOf")
                self._demand(self._exclusive(value), path, key, "two of its branches may hold at once; use anyOf")
            yield ("anyOf" if key == "oneOf" else key), parts
        elif key in _NAMED:
            self._demand(isinstance(value, Mapping), path, key, "it is no object of schemas")
            if key == "patternProperties":
                for pattern in value:
                    self._pattern(pattern, path, key)
            yield key, {name: self.copy(part, f"{path}/{_escaped(name)}", depth + 1) for name, part in value.items()}
        else:
            self._value(key, value, path)
            yield key, value

    def _value(self, key: str, value: Any, path: str) -> None:
        match key:
            case "type":
                names = value if isinstance(value, list) else [value]
                self._demand(
                    names and all(isinstance(n, str) and n in _TYPES for n in names), path, key, "there is no such type"
                )
            case "enum":
                self._demand(isinstance(value, list) and value, path, key, "it is no list of values")
            case "required":
                good = isinstance(value, list) and all(isinstance(name, str) for name in value)
                self._demand(good, path, key, "it is no list of names")
            case "pattern":
                self._pattern(value, path, key)
            case "format":
                self._demand(
                    value in FORMATS if isinstance(value, str) else False,
                    path,
                    key,
                    f"the format {str(value)[:64]!r} is not known",
                )
            case "$ref":
                good = isinstance(value, str) and value.startswith("#") and self._target(value) is not None
                self._demand(good, path, key, f"{str(value)[:128]!r} is no place in this schema")
            case "const":
                pass
            case _:
                good = isinstance(value, int | float) and not isinstance(value, bool)
                self._demand(good, path, key, "it is no number")

    def _pattern(self, value: Any, path: str, key: str) -> None:
        self._demand(isinstance(value, str), path, key, "it is no regular expression")
        problem = self._pattern_error(value)
        self._demand(not problem, path, key, problem)

    def _target(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found if isinstance(found, Mapping | bool) else None

    def _exclusive(self, branches: Sequence[Any]) -> bool:
        """Whether it can be seen that no value satisfies two of ``branches``: by type, or by a constant in the same member."""
        resolved = [self._resolved(branch) for branch in branches]
        return all(_disjoint(first, second) for index, first in enumerate(resolved) for second in resolved[index + 1 :])

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return {}
            if not isinstance(schema.get("$ref"), str):
                return schema
            schema = self._target(schema["$ref"])
        return {}

    def _demand(self, good: Any, path: str, key: str, why: str) -> None:
        if not good:
            self._fail(path, key, why)

    def _fail(self, path: str, key: str, why: str) -> NoReturn:
        _refuse(self._field, path, why, key)


def _disjoint(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    kinds = [_kinds(schema) for schema in (first, second)]
    if kinds[0] and kinds[1] and not (kinds[0] & kinds[1]):
        return True
    if kinds != [{"object"}, {"object"}]:
        return False
    shared = _members(first) & _members(second)
    return any(_apart(first["properties"][name], second["properties"][name]) for name in shared)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    names = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set()
    return names | {"integer"} if "number" in names else names


def _members(schema: Mapping[str, Any]) -> set[str]:
    """Required members that have a schema."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return set()
    return {name for name in required if isinstance(name, str) and isinstance(properties.get(name), Mapping)}


def _apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    choices = []
    for schema in (first, second):
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            return False
        choices.append(set(values))
    return not choices[0] & choices[1]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refuse(field: str, path: str, why: str, keyword: str = "") -> NoReturn:
    place = f" at {path[:256]}" if path else ""
    raise RequestError(
        f"{field}: {keyword[:64] or 'the schema'}{place} cannot be enforced", why, "take it out of the schema, and check it yourself",
        kind="unsupported" if keyword else "invalid", field=field, code="unsupported_schema",
    )  # fmt: skip
