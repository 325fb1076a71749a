"""What a request demands of the form of its answer, as a grammar. Pure."""

from collections.abc import Mapping
from typing import Any

from atlas_core.server.schema import ChatRequest, Request
from atlas_core.text.grammar import choice_grammar, json_grammar, regex_grammar
from atlas_core.vocab.errors import RequestError

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NEUTRAL = frozenset({"disable_fallback"})
"""Members of structured_outputs that say nothing here: there is no fallback."""


def answer_grammar(request: Request) -> str | None:
    """A Lark grammar of the answer, or None when any answer will do. Raises RequestError that names the field."""
    found: dict[str, str | None] = {}
    if isinstance(request, ChatRequest):
        found["response_format"] = _response_format(request.response_format)
    found["structured_outputs"] = _structured_outputs(request.structured_outputs or {})
    if request.regex is not None:
        found["regex"] = _structured_outputs({"regex": request.regex}, "")
    if request.json_schema is not None:
        found["json_schema"] = json_grammar(request.json_schema, "json_schema")
    given = [(name, grammar) for name, grammar in found.items() if grammar is not None]
    if len(given) > 1:
        raise _invalid(given[1][0], f"{given[0][0]} demands something already")
    if given and request.min_tokens:
        raise _invalid("min_tokens", "an answer of a given form ends when the form does")
    return given[0][1] if given else None


def form_field(request: Request) -> str | None:
    """The field that demands a form of the answer, of those that answer_grammar reads."""
    form = request.response_format if isinstance(request, ChatRequest) else None
    if form and form.get("type") != "text":
        return "response_format"
    if request.structured_outputs:
        return "structured_outputs"
    return next((name for name in ("regex", "json_schema") if getattr(request, name) is not None), None)


def _response_format(asked: Mapping[str, Any] | None) -> str | None:
    match (asked or {"type": "text"}).get("type"):
        case "text":
            return None
        case "json_object":
            return json_grammar({"type": "object"}, "response_format")
        case "json_schema":
            outer = (asked or {}).get("json_schema")
            if not isinstance(outer, Mapping) or "schema" not in outer:
                raise _invalid("response_format.json_schema", "it has no schema")
            return json_grammar(outer["schema"], "response_format.json_schema.schema")
    raise _invalid("response_format.type", "it is none of text, json_object and json_schema")


def _structured_outputs(asked: Mapping[str, Any], place: str = "structured_outputs.") -> str | None:
    given = {
        name: value
        for name, value in asked.items()
        if value is not None and value is not False and name not in _NEUTRAL
    }
    unknown = sorted(given.keys() - set(_KINDS))
    if unknown:
        raise RequestError(
            f"structured_outputs.{unknown[0][:64]} is not supported", f"there are {', '.join(_KINDS)}", "use one of them",
            kind="unsupported", field=f"structured_outputs.{unknown[0][:64]}", code="unsupported_parameter",
        )  # fmt: skip
    if not given:
        return None
    if len(given) > 1:
        raise _invalid("structured_outputs", f"it asks for {' and '.join(sorted(given))} at once")
    ((kind, value),) = given.items()
    field = f"{place}{kind}"
    match kind:
        case "json":
            return json_grammar(value, field)
        case "json_object":
            return json_grammar({"type": "object"}, field)
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
                raise _invalid(field, "it is no list of texts")
            return choice_grammar(value)
    if not isinstance(value, str) or not value.strip():
        raise _invalid(field, "it is no text")
    return regex_grammar(value) if kind == "regex" else value


def _invalid(field: str, why: str) -> RequestError:
    return RequestError(f"{field} is not valid", why, "", field=field, code="invalid_value")
