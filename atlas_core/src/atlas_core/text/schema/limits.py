"""What each keyword says about values of one type, and what its contrary says."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from math import comb, inf
from typing import Any, Protocol

from msgspec.structs import replace

from atlas_core.text.schema.cases import (
    ALL,
    ANY,
    NEVER,
    NONE,
    Array,
    Case,
    Cases,
    Number,
    Object,
    Patterns,
    State,
    Text,
    absent,
    only,
)
from atlas_core.text.schema.constants import values
from atlas_core.text.schema.document import Node, Scope
from atlas_core.text.schema.keywords import Unenforceable
from atlas_core.text.schema.names import name_pattern

ALWAYS = inf
_CONTRARY = "its contrary cannot be enforced"
_SUBSETS = 64
_POSITIONS = 64


class Maker(Protocol):
    """Who makes demands of schemas (see normal.Normal)."""

    patterns: Patterns

    def child(self, node: Node, scope: Scope, holds: bool, *keys: str | int) -> State:
        """A schema below ``node`` as a demand."""
        ...

    def state(self, node: Node, scope: Scope, holds: bool = True) -> State:
        """A schema as a demand."""
        ...

    def cases(self, state: State) -> Cases:
        """The alternatives in which a demand holds."""
        ...

    def check(self, pattern: str) -> None:
        """Look at a regular expression."""
        ...


Meaning = Callable[[Maker, Node, Mapping[str, Any], bool, Scope], Cases]


def matches(schema: Mapping[str, Any]) -> tuple[int, int | None]:
    """How many items ``contains`` has to hold for."""
    most = schema.get("maxContains")
    return int(schema.get("minContains", 1)), None if most is None else int(most)


def contains(
    maker: Maker, node: Node, schema: Mapping[str, Any], scope: Scope, arrays: Iterable[Case], sighted: bool
) -> Iterator[Case]:
    """``arrays`` in which ``contains`` holds, one for each choice of places where that has to be."""
    least, most = matches(schema)
    yes, no = (maker.child(node, scope, holds, "contains") for holds in (True, False))
    for array in arrays:
        if not isinstance(array, Array):
            continue
        if yes == ANY:
            yield replace(
                array, least=max(array.least, least), most=min(array.most, inf if most is None else most), seen=ALWAYS
            )
            continue
        if sighted:
            raise Unenforceable("it stands with unevaluatedItems")
        if most is None and not least:
            yield array
            continue
        size = int(min(array.most, _POSITIONS + 1))
        sizes = [least] if most is None else range(least, min(most, size) + 1)
        if size > _POSITIONS or sum(comb(size, count) for count in sizes) > _POSITIONS:
            raise Unenforceable("there is no small maxItems beside it")
        for count in sizes:
            for places in combinations(range(size), count):
                first = tuple(
                    array.item(index) | (yes if index in places else ANY if most is None else no)
                    for index in range(size)
                )
                needed = places[-1] + 1 if places else 0
                yield replace(array, first=first, least=max(array.least, needed))


def _limit(kind: str, yes: Callable[[Any], Case], no: Callable[[Any], Case] | None, keyword: str) -> Meaning:
    def meaning(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
        value = schema[keyword]
        if holds:
            return {**ALL, kind: _sound(yes(value))}
        if no is None:
            raise Unenforceable(_CONTRARY)
        return only(kind, *_sound(no(value)))

    return meaning


def _sound(case: Case) -> tuple[Case, ...]:
    most = getattr(case, "most", None)
    return () if most is not None and most < 0 else (case,)


def _types(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
    named = schema["type"]
    names = set(named) if isinstance(named, list) else {named}
    kinds = {**ALL}
    whole = "number" in names
    for kind in kinds:
        if (kind in names) is not holds:
            kinds[kind] = ()
    if "integer" in names and not whole:
        if not holds:
            raise Unenforceable(_CONTRARY)
        kinds["number"] = (Number(integer=True),)
    return kinds


def _values(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope, *, keyword: str) -> Cases:
    listed = schema["enum"] if keyword == "enum" else [schema["const"]]

    def inner(value: Any, inside: bool) -> State:
        return maker.state(Node({"const": value}, node.at(keyword), node.resource), scope, inside)

    return values(listed, holds, inner)


def _pattern(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
    if not holds:
        raise Unenforceable(_CONTRARY)
    maker.check(schema["pattern"])
    return {**ALL, "string": (Text(patterns=frozenset({schema["pattern"]})),)}


def _members(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
    """``properties``, ``patternProperties`` and ``additionalProperties``, which look at one another."""
    names: Iterable[str] = schema.get("properties", ())
    patterns: Iterable[str] = schema.get("patternProperties", ())
    for pattern in patterns:
        try:
            maker.check(pattern)
        except Unenforceable as problem:
            raise Unenforceable(problem.why, node.at("patternProperties"), "patternProperties") from None
    others = "additionalProperties" in schema
    if not holds:
        return only("object", *_other_members(maker, node, list(names), list(patterns), others, scope))
    by_pattern = {pattern: maker.child(node, scope, True, "patternProperties", pattern) for pattern in patterns}
    members = {}
    for name in names:
        found = [state for pattern, state in by_pattern.items() if maker.patterns.matches([pattern], name)]
        members[name] = maker.child(node, scope, True, "properties", name).union(*found)
    rest = maker.child(node, scope, True, "additionalProperties") if others else ANY
    case = Object(members, by_pattern, rest, seen=frozenset(names), seen_patterns=frozenset(patterns), seen_all=others)
    return {**ALL, "object": (case,)}


def _other_members(
    maker: Maker, node: Node, names: Sequence[str], patterns: Sequence[str], others: bool, scope: Scope
) -> Iterator[Object]:
    for name in names:
        wrong = maker.child(node, scope, False, "properties", name)
        if wrong != NEVER:
            yield Object({name: wrong}, required=(name,))
    for pattern in patterns:
        if maker.child(node, scope, True, "patternProperties", pattern) != ANY:
            raise Unenforceable(_CONTRARY, node.at("patternProperties"), "patternProperties")
    rest = maker.child(node, scope, True, "additionalProperties") if others else ANY
    if rest == ANY:
        return
    if patterns or maker.child(node, scope, False, "additionalProperties") != ANY or 2 ** len(names) > _SUBSETS:
        raise Unenforceable(_CONTRARY, node.at("additionalProperties"), "additionalProperties")
    for count in range(len(names) + 1):
        for present in combinations(names, count):
            members = {name: ANY if name in present else NEVER for name in names}
            yield Object(members, required=present, least=count + 1)


def _required(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
    names = tuple(dict.fromkeys(schema["required"]))
    return {**ALL, "object": (Object(required=names),)} if holds else only("object", *map(absent, names))


def _names(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
    texts = maker.cases(maker.child(node, scope, True, "propertyNames"))["string"]
    if texts == (Text(),):
        return ALL if holds else NONE
    if not holds:
        if texts:
            raise Unenforceable(_CONTRARY)
        return only("object", Object(least=1))
    if not texts:
        return {**ALL, "object": (Object(most=0),)}
    found = [text for text in texts if isinstance(text, Text)]
    if all(text.values is not None and not text.formats for text in found):
        names = sorted(frozenset().union(*(text.values or frozenset() for text in found)))
        return {**ALL, "object": (Object(dict.fromkeys(names, ANY), rest=NEVER),)}
    pattern = "|".join(f"(?:{name_pattern(text)})" for text in found)
    return {**ALL, "object": (Object(patterns={pattern: ANY}, rest=NEVER),)}


def _items(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
    """``prefixItems`` and ``items``."""
    count = len(schema.get("prefixItems", ()))
    others = "items" in schema
    if holds:
        first = tuple(maker.child(node, scope, True, "prefixItems", index) for index in range(count))
        rest = maker.child(node, scope, True, "items") if others else ANY
        return {**ALL, "array": (Array(first, rest, seen=ALWAYS if others else count),)}
    found = []
    for index in range(count):
        wrong = maker.child(node, scope, False, "prefixItems", index)
        found.append(Array((*(ANY,) * index, wrong), least=index + 1))
    if others and maker.child(node, scope, True, "items") != ANY:
        if maker.child(node, scope, False, "items") != ANY:
            raise Unenforceable(_CONTRARY)
        found.append(Array(least=count + 1))
    return only("array", *found)


def _unique(maker: Maker, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
    if schema["uniqueItems"]:
        raise Unenforceable("generated text cannot be held to it")
    return ALL if holds else NONE


KEYWORDS: Mapping[str, Meaning] = {
    "type": _types,
    "const": lambda *given: _values(*given, keyword="const"),
    "enum": lambda *given: _values(*given, keyword="enum"),
    "pattern": _pattern,
    "format": _limit("string", lambda name: Text(formats=frozenset({name})), None, "format"),
    "minLength": _limit("string", lambda n: Text(least=int(n)), lambda n: Text(most=int(n) - 1), "minLength"),
    "maxLength": _limit("string", lambda n: Text(most=int(n)), lambda n: Text(least=int(n) + 1), "maxLength"),
    "minimum": _limit("number", lambda n: Number(low=n), lambda n: Number(high=n, high_open=True), "minimum"),
    "maximum": _limit("number", lambda n: Number(high=n), lambda n: Number(low=n, low_open=True), "maximum"),
    "exclusiveMinimum": _limit(
        "number", lambda n: Number(low=n, low_open=True), lambda n: Number(high=n), "exclusiveMinimum"
    ),
    "exclusiveMaximum": _limit(
        "number", lambda n: Number(high=n, high_open=True), lambda n: Number(low=n), "exclusiveMaximum"
    ),
    "multipleOf": _limit("number", lambda n: Number(step=Fraction(str(n))), None, "multipleOf"),
    "minItems": _limit("array", lambda n: Array(least=int(n)), lambda n: Array(most=int(n) - 1), "minItems"),
    "maxItems": _limit("array", lambda n: Array(most=int(n)), lambda n: Array(least=int(n) + 1), "maxItems"),
    "minProperties": _limit(
        "object", lambda n: Object(least=int(n)), lambda n: Object(most=int(n) - 1), "minProperties"
    ),
    "maxProperties": _limit(
        "object", lambda n: Object(most=int(n)), lambda n: Object(least=int(n) + 1), "maxProperties"
    ),
    "properties": _members,
    "required": _required,
    "propertyNames": _names,
    "items": _items,
    "uniqueItems": _unique,
}
"""Keywords that speak of values by type, each with what it says. ``properties`` and ``items`` speak for their neighbours too."""
