"""Grammars that answers must follow, as llguidance reads them: one text that crosses to the engine."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from llguidance import LLMatcher

from atlas_core.contracts.dialect import ReasoningSyntax
from atlas_core.text.dialect.thought import Opening
from atlas_core.text.json_schema import checked
from atlas_core.text.schema.keywords import Unenforceable
from atlas_core.vocab.errors import RequestError

MAX_BYTES = 1 << 19
"""Of a whole grammar."""
_WHITESPACE = "[ \\t\\n\\r]{0,40}"
"""Between tokens of JSON; without a limit a model can write blanks for ever."""
_EMPTY = "Regex is empty"
"""What the compiler says of schemas that no text satisfies, as against those of which it cannot tell."""
_QUESTIONS = 2_000
"""About regular expressions, for one schema."""
_OPTIONS = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": 'nrbtf\\"'}
"""Without escapes by number: the compiler lets them spell the names of members that have a schema of their own."""
_BREAKS = "/[ \\n]{0,4}/"


def json_rule(schema: Any, field: str) -> str:
    """A Lark term for JSON that satisfies ``schema``. Raises RequestError that names keyword and place, see json_schema."""
    try:
        asked = json.dumps(schema)
    except (ValueError, TypeError, RecursionError):
        _refuse(field, "its schema is nested too deeply, or no JSON")
    return _json_rule(asked, field)


def json_grammar(schema: Any, field: str) -> str:
    """JSON that satisfies ``schema``; members come in the order of ``properties``. Raises RequestError."""
    return "%llguidance {}\nstart: " + json_rule(schema, field) + "\n"


def choice_grammar(choices: Sequence[str]) -> str:
    """One of ``choices``, as it stands."""
    return "%llguidance {}\nstart: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices) + "\n"


def regex_grammar(regex: str) -> str:
    """Text that ``regex`` matches as a whole."""
    compiled: Mapping[str, Any] = json.loads(LLMatcher.grammar_from_regex(regex))
    return str(compiled["grammars"][0]["lark_grammar"])


def whole_grammar(answers: Sequence[str], syntax: ReasoningSyntax | None, state: Opening) -> str:
    """The grammar of a whole output: one of ``answers``, Lark grammars, behind a thought where one is open or may come."""
    thought, rules = "", ""
    if syntax is not None and state != "closed":
        start, end = (json.dumps(text, ensure_ascii=False) for text in (syntax.start, syntax.end))
        thought = f"thought {_BREAKS} " if state == "open" else f"({start} thought {_BREAKS})? "
        rules = f"thought[suffix={end}]: /(?s:.*)/\n"
    names = [f"answer_{index}" for index in range(len(answers))]
    choice = " | ".join(f"@{name}" for name in names)
    main = f"%llguidance {{}}\nstart: {thought}({choice})\n{rules}"
    parts = [("main", main), *zip(names, answers, strict=True)]
    return json.dumps({"grammars": [{"name": name, "lark_grammar": lark} for name, lark in parts]})


def check(grammar: str, field: str) -> None:
    """Compile ``grammar`` once. Raises RequestError when it is too large or not valid; may take a while."""
    if len(grammar) > MAX_BYTES:
        _refuse(field, f"it has {len(grammar)} bytes compiled, and {MAX_BYTES} may be")
    problem = _problem(grammar)
    if problem:
        _refuse(field, problem)


@lru_cache(maxsize=256)
def _problem(grammar: str) -> str:
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(messages)[:500] if failed else ""


class _Patterns:
    """A schema.cases.Patterns that asks the compiler, and not too often."""

    def __init__(self) -> None:
        self._asked = 0

    def error(self, pattern: str) -> str:
        return self._problem({"pattern": pattern})

    def matches(self, patterns: Sequence[str], text: str) -> bool:
        return not patterns or not self._none({"enum": [text], "allOf": [{"pattern": one} for one in patterns]})

    def disjoint(self, first: str, second: str) -> bool:
        return self._none({"allOf": [{"pattern": first}, {"pattern": second}]})

    def _none(self, limits: Mapping[str, Any]) -> bool:
        """Whether there are no texts of such a schema. Raises Unenforceable when that cannot be told."""
        problem = self._problem(limits)
        if problem and _EMPTY not in problem:
            raise Unenforceable("its regular expressions cannot be compared")
        return bool(problem)

    def _problem(self, limits: Mapping[str, Any]) -> str:
        """Why there are no texts of such a schema; empty when there are."""
        self._asked += 1
        if self._asked > _QUESTIONS:
            raise Unenforceable("it has too many regular expressions and names")
        return _problem(LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", **limits})))


@lru_cache(maxsize=64)
def _json_rule(schema: str, field: str) -> str:
    """As json_rule, of a schema as text: agents send the same ones with every request."""
    found = checked(json.loads(schema), field, _Patterns())
    return "%json " + json.dumps({**found, "x-guidance": _OPTIONS})


def _refuse(field: str, why: str) -> NoReturn:
    raise RequestError(
        f"{field} is no grammar that can be enforced", why, "simplify it", field=field, code="invalid_grammar"
    )
