"""The keywords of JSON Schema: which are dealt with, which say nothing, and what their values look like."""

from collections.abc import Callable, Mapping
from typing import Any

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
ONE = frozenset(
    {
        "items", "additionalProperties", "not", "if", "then", "else", "propertyNames", "contains", "unevaluatedItems",
        "unevaluatedProperties",
    }
)  # fmt: skip
"""Have one schema for a value."""
MANY = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
"""Have a list of schemas for a value."""
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Have named schemas for a value."""
ANNOTATIONS = frozenset(
    {
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable",
        "discriminator", "$schema", "$comment", "contentEncoding", "contentMediaType",
    }
)  # fmt: skip
"""Keywords that say nothing about which values are valid; names that begin with ``x-`` are as harmless, but for one."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
MAX_NUMBER = 1e300
OPTIONS = "x-guidance"
"""Would change how the compiler reads the schema."""


class Unenforceable(Exception):  # noqa: N818 - it is caught here, and becomes a RequestError
    """Something that generated text cannot be held to: why, and where as soon as that is known."""

    def __init__(self, why: str, path: str | None = None, keyword: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.path = path
        self.keyword = keyword


def is_annotation(keyword: str) -> bool:
    """Whether a keyword says nothing about which values are valid."""
    return keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != OPTIONS)


def _type(value: Any) -> str:
    names = value if isinstance(value, list) else [value]
    return "" if names and all(isinstance(n, str) and n in TYPES for n in names) else "there is no such type"


def _enum(value: Any) -> str:
    return "" if isinstance(value, list) and value else "it is no list of values"


def _names(value: Any) -> str:
    return "" if isinstance(value, list) and all(isinstance(name, str) for name in value) else "it is no list of names"


def _named_names(value: Any) -> str:
    good = isinstance(value, Mapping) and not any(_names(names) for names in value.values())
    return "" if good else "it is no object of lists of names"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) else "it is no text"


def _pattern(value: Any) -> str:
    return "" if isinstance(value, str) else "it is no regular expression"


def _format(value: Any) -> str:
    known = isinstance(value, str) and value in FORMATS
    return "" if known else f"the format {str(value)[:64]!r} is not known"


def number(value: Any) -> str:
    """What is wrong with a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "it is no number"
    return "" if abs(value) < MAX_NUMBER else f"it is not below {MAX_NUMBER:g}"


def _count(value: Any) -> str:
    return number(value) or ("" if value >= 0 and value == int(value) else "it is no count")


def _step(value: Any) -> str:
    return number(value) or ("" if value > 0 else "it is not above zero")


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "it is neither true nor false"


def _anything(value: Any) -> str:
    return ""


CHECKS: Mapping[str, Callable[[Any], str]] = {
    "type": _type, "enum": _enum, "const": _anything, "required": _names, "dependentRequired": _named_names,
    "pattern": _pattern, "format": _format, "$ref": _text, "$dynamicRef": _text, "$id": _text, "$anchor": _text,
    "$dynamicAnchor": _text, "uniqueItems": _flag, "minimum": number, "maximum": number, "exclusiveMinimum": number,
    "exclusiveMaximum": number, "multipleOf": _step,
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains"), _count
    ),
}  # fmt: skip
"""What is wrong with a keyword's value, or nothing."""
FIRST_CLASS = ONE | MANY | NAMED | CHECKS.keys()
"""Keywords that generated text is held to, wherever that can be done exactly."""
