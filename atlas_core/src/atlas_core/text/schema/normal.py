"""What a schema allows, as alternatives: sets of values of one type each, whose members and items are schemas again.

Every keyword has a meaning and a contrary; neighbours and ``allOf`` meet, ``anyOf`` joins, ``not`` goes inwards until it is gone. What
was evaluated is kept with each alternative, so that ``unevaluatedProperties`` and ``unevaluatedItems`` become ordinary limits. The
rewriting is exact: where a meaning or a contrary is no set that a grammar could be held to, Unenforceable is raised.
"""

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

from atlas_core.text.schema import limits
from atlas_core.text.schema.cases import (
    ALL,
    ANY,
    KINDS,
    NONE,
    Array,
    Case,
    Cases,
    Literal,
    Object,
    Patterns,
    State,
    absent,
    meet,
    only,
    without_sight,
)
from atlas_core.text.schema.document import Document, Node, Scope
from atlas_core.text.schema.keywords import Unenforceable, is_annotation

MAX_CASES = 128
"""Alternatives of one type in one place."""

MAX_MEETINGS = 50_000
"""Pairs of alternatives that are compared for one document."""

_LATE = ("contains", "unevaluatedItems", "unevaluatedProperties")
"""Keywords that look at what the others have made of arrays and objects."""
_WITH_OTHERS = frozenset(
    {
        "then", "else", "minContains", "maxContains", "$defs", "definitions", "$anchor", "$dynamicAnchor", "$id", "patternProperties",
        "additionalProperties", "prefixItems",
    }
)  # fmt: skip
"""Keywords that are read with another one, or mean nothing by themselves."""
_GROUPS = {
    "properties": ("properties", "patternProperties", "additionalProperties"),
    "items": ("items", "prefixItems"),
}
_GLANCES = 6
"""Levels down to which branches are compared."""


class Normal:
    """The alternatives of a document's schemas."""

    def __init__(self, document: Document, patterns: Patterns) -> None:
        self.patterns = patterns
        self._document = document
        self._sighted = document.says("unevaluatedItems", "unevaluatedProperties")
        self._known: dict[Literal, Cases] = {}
        self._open: set[Literal] = set()
        self._meetings = 0

    def state(self, node: Node, scope: Scope, holds: bool = True) -> State:
        """The demand that ``node``, reached from ``scope``, holds, or does not."""
        return ANY if node.schema is holds else frozenset({self._literal(node, holds, scope)})

    def child(self, node: Node, scope: Scope, holds: bool, *keys: str | int) -> State:
        """A schema below ``node`` as a demand."""
        return self.state(self._document.child(node, *keys), scope, holds)

    def cases(self, state: State) -> Cases:
        """The alternatives in which all of ``state`` holds."""
        ordered = sorted(state, key=lambda literal: (literal[0].path, literal[1], literal[2]))
        met = self._all(self._of(literal) for literal in ordered)
        return {kind: tuple(dict.fromkeys(map(without_sight, cases))) for kind, cases in met.items()}

    def check(self, pattern: str) -> None:
        """Raises Unenforceable for a regular expression that cannot be dealt with."""
        problem = self.patterns.error(pattern)
        if problem:
            raise Unenforceable(problem)

    def _literal(self, node: Node, holds: bool, scope: Scope) -> Literal:
        return node, holds, self._document.enter(node, scope)

    def _of(self, literal: Literal) -> Cases:
        known = self._known.get(literal)
        if known is not None:
            return known
        node, holds, scope = literal
        if literal in self._open:
            raise Unenforceable("it refers to itself without end", node.path)
        self._open.add(literal)
        if isinstance(node.schema, bool):
            found = ALL if node.schema is holds else NONE
        else:
            found = self._schema(node, node.schema, holds, scope)
        self._open.remove(literal)
        if not holds:
            # A schema that does not hold has evaluated nothing.
            found = {kind: tuple(dict.fromkeys(map(without_sight, cases))) for kind, cases in found.items()}
        self._known[literal] = found
        return found

    def _schema(self, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
        names = [name for name in schema if not (is_annotation(name) or name in _WITH_OTHERS or name in _LATE)]
        names += [
            head for head, group in _GROUPS.items() if head not in schema and any(name in schema for name in group)
        ]
        parts = (self._keyword(node, schema, name, holds, scope) for name in names)
        if not holds:
            late = (self._contrary(node, schema, name, scope) for name in _LATE if name in schema)
            return self._any([*parts, *late])
        found = self._all(parts)
        for name in _LATE:
            if name in schema:
                found = self._late(node, schema, name, scope, found)
        return found

    def _keyword(self, node: Node, schema: Mapping[str, Any], name: str, holds: bool, scope: Scope) -> Cases:
        try:
            return self._meaning(node, schema, name, holds, scope)
        except Unenforceable as problem:
            if problem.path is None:
                raise Unenforceable(problem.why, node.at(name), name) from None
            raise

    def _meaning(self, node: Node, schema: Mapping[str, Any], name: str, holds: bool, scope: Scope) -> Cases:
        value, document = schema.get(name), self._document
        match name:
            case "allOf" | "anyOf":
                parts = [self._below(node, scope, holds, name, index) for index in range(len(value or ()))]
                return self._all(parts) if (name == "allOf") is holds else self._any(parts)
            case "oneOf":
                return self._one_of(node, len(value or ()), holds, scope)
            case "not":
                return self._below(node, scope, not holds, name)
            case "if":
                return self._branches(node, schema, holds, scope)
            case "$ref" | "$dynamicRef":
                reference = str(value)
                target = (
                    document.follow(node, reference)
                    if name == "$ref"
                    else document.follow_dynamic(node, reference, scope)
                )
                return self._of(self._literal(target, holds, scope))
            case "dependentSchemas":
                parts = [self._dependent(node, key, holds, scope) for key in value or ()]
                return self._all(parts) if holds else self._any(parts)
            case "dependentRequired":
                return self._dependent_names(value or {}, holds)
        return limits.KEYWORDS[name](self, node, schema, holds, scope)

    def _below(self, node: Node, scope: Scope, holds: bool, *keys: str | int) -> Cases:
        return self._of(self._literal(self._document.child(node, *keys), holds, scope))

    def _one_of(self, node: Node, count: int, holds: bool, scope: Scope) -> Cases:
        yes = [self._below(node, scope, True, "oneOf", index) for index in range(count)]
        pairs = [(i, j, self._all([yes[i], yes[j]])) for i, j in combinations(range(count), 2)]
        if not holds:
            none = self._all(self._below(node, scope, False, "oneOf", index) for index in range(count))
            return self._any([none, *(both for _, _, both in pairs)])
        others: dict[int, list[int]] = {index: [] for index in range(count)}
        for i, j, both in pairs:
            if not self._empty(both, _GLANCES):
                others[i].append(j)
                others[j].append(i)
        try:
            return self._any(
                self._all([yes[i], *(self._below(node, scope, False, "oneOf", j) for j in others[i])]) for i in others
            )
        except Unenforceable as problem:
            where = f" ({problem.keyword} at {problem.path}: {problem.why})" if problem.path else ""
            raise Unenforceable(f"two of its branches may hold at once; use anyOf{where}") from None

    def _branches(self, node: Node, schema: Mapping[str, Any], holds: bool, scope: Scope) -> Cases:
        if not ("then" in schema or "else" in schema or self._sighted):
            return ALL if holds else NONE
        ways = []
        for condition, name in ((True, "then"), (False, "else")):
            if name in schema:
                ways.append(
                    self._all([self._below(node, scope, condition, "if"), self._below(node, scope, holds, name)])
                )
            elif holds:
                ways.append(self._below(node, scope, condition, "if"))
        return self._any(ways)

    def _dependent(self, node: Node, key: str, holds: bool, scope: Scope) -> Cases:
        then = self._all([_having(key), self._below(node, scope, holds, "dependentSchemas", key)])
        return self._any([{**ALL, "object": (absent(key),)}, then]) if holds else then

    def _dependent_names(self, names: Mapping[str, Iterable[str]], holds: bool) -> Cases:
        found: list[Cases] = []
        for key, needed in names.items():
            if holds:
                found.append({**ALL, "object": (absent(key), Object(required=(key, *needed)))})
            else:
                missing = self._any(only("object", absent(name)) for name in needed)
                found.append(self._all([_having(key), missing]))
        return self._all(found) if holds else self._any(found)

    def _contrary(self, node: Node, schema: Mapping[str, Any], name: str, scope: Scope) -> Cases:
        least, most = limits.matches(schema)
        if name == "contains" and most is None and least <= 1:
            return only("array", Array(rest=self.child(node, scope, False, name))) if least else NONE
        raise Unenforceable("its contrary cannot be enforced", node.at(name), name)

    def _late(self, node: Node, schema: Mapping[str, Any], name: str, scope: Scope, found: Cases) -> Cases:
        try:
            if name == "contains":
                arrays = limits.contains(self, node, schema, scope, found["array"], self._sighted)
                return {**found, "array": self._checked(arrays)}
            kind = "array" if name == "unevaluatedItems" else "object"
            rest = self.child(node, scope, True, name)
            met = (meet(case, _unseen(case, rest), self.patterns) for case in found[kind])
            return {**found, kind: tuple(case for case in met if case is not None)}
        except Unenforceable as problem:
            if problem.path is None:
                raise Unenforceable(problem.why, node.at(name), name) from None
            raise

    def _all(self, parts: Iterable[Cases]) -> Cases:
        found = ALL
        for part in parts:
            found = {kind: self._meet(kind, found[kind], part[kind]) for kind in KINDS}
        return found

    def _meet(self, kind: str, one: tuple[Case, ...], other: tuple[Case, ...]) -> tuple[Case, ...]:
        everything = (KINDS[kind],)
        if everything in (one, other):
            return other if one == everything else one
        self._meetings += len(one) * len(other)
        if self._meetings > MAX_MEETINGS:
            raise Unenforceable("too many alternatives meet")
        met = (meet(first, second, self.patterns) for first in one for second in other)
        return self._checked(case for case in met if case is not None)

    def _any(self, parts: Iterable[Cases]) -> Cases:
        parts = list(parts)
        found = {kind: self._checked(case for part in parts for case in part[kind]) for kind in KINDS}
        if self._sighted:
            return found
        return {kind: (KINDS[kind],) if KINDS[kind] in cases else cases for kind, cases in found.items()}

    def _checked(self, cases: Iterable[Case]) -> tuple[Case, ...]:
        found: dict[Case, None] = {}
        for case in cases:
            found[case] = None
            if len(found) > MAX_CASES:
                raise Unenforceable(f"it comes to more than {MAX_CASES} alternatives")
        return tuple(found)

    def _empty(self, cases: Cases, glances: int) -> bool:
        """Whether it can be seen, ``glances`` levels down, that there is no value."""
        return all(all(self._barren(case, glances) for case in group) for group in cases.values())

    def _barren(self, case: Case, glances: int) -> bool:
        match case:
            case Object():
                needed = [case.members[name] for name in case.required if name in case.members]
            case Array():
                needed = [case.item(index) for index in range(min(case.least, len(case.first)))]
            case _:
                return False
        return glances > 0 and any(self._empty(self.cases(state), glances - 1) for state in needed)


def _having(key: str) -> Cases:
    return only("object", Object(required=(key,)))


def _unseen(case: Case, rest: State) -> Case:
    """What ``rest`` for all that was not evaluated means for a case."""
    match case:
        case Array():
            return Array((ANY,) * int(case.seen), rest, seen=limits.ALWAYS) if case.seen < limits.ALWAYS else Array()
        case Object():
            if case.seen_all:
                return Object()
            patterns = dict.fromkeys(sorted(case.seen_patterns), ANY)
            return Object(dict.fromkeys(sorted(case.seen), ANY), patterns, rest, seen_all=True)
    return case
