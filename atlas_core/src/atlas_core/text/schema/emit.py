"""From alternatives back to a schema, of keywords that the compiler enforces together and in every combination."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import combinations, zip_longest
from math import inf
from typing import Any, TypeVar

from msgspec.structs import replace

from atlas_core.text.schema.cases import (
    ALL,
    Array,
    Boolean,
    Case,
    Cases,
    Null,
    Number,
    Object,
    Patterns,
    State,
    Text,
    held,
)
from atlas_core.text.schema.keywords import Unenforceable
from atlas_core.text.schema.names import other_than, writable
from atlas_core.text.schema.normal import Normal

T = TypeVar("T")

MAX_STATES = 4096
_SUBSETS = 64
"""Of optional members, where how many there are is limited."""
_STEPS = 20_000
"""Sum of all ``multipleOf``, as whole numbers without their powers of ten: the compiler makes as many states."""


def emitted(normal: Normal, root: State, patterns: Patterns) -> dict[str, Any] | bool:
    """A schema of what ``root`` allows. Raises Unenforceable."""
    return _Emitter(normal, patterns).whole(root)


class _Emitter:
    def __init__(self, normal: Normal, patterns: Patterns) -> None:
        self._normal = normal
        self._patterns = patterns
        self._cases: dict[State, Cases] = {}
        self._uses: Counter[State] = Counter()
        self._fertile: set[State] = set()
        self._names: dict[State, str] = {}
        self._shared: dict[str, Any] = {}
        self._steps = 0

    def whole(self, root: State) -> dict[str, Any] | bool:
        self._discover(root)
        self._grow()
        if root not in self._fertile:
            raise Unenforceable("no value satisfies it", "#")
        found = self._schema(root)
        if isinstance(found, bool):
            return found
        return {**found, "$defs": self._shared} if self._shared else found

    def _discover(self, root: State) -> None:
        """Find every state that can be reached, and how often it is referred to."""
        waiting = [root]
        self._uses[root] += 1
        while waiting:
            state = waiting.pop()
            cases = self._cases[state] = self._blaming(state, self._complete_cases, state)
            if len(self._cases) > MAX_STATES:
                raise Unenforceable("it comes to too many schemas", "#")
            for inner in _inner(cases):
                if inner not in self._uses:
                    waiting.append(inner)
                self._uses[inner] += 1

    def _blaming(self, state: State, work: Callable[..., T], *given: Any) -> T:
        """The result of ``work``; what it cannot do is said of the place of ``state``."""
        try:
            return work(*given)
        except Unenforceable as problem:
            if problem.path is not None:
                raise
            path = min((node.path for node, _, _ in state), default="#")
            path += f"/{problem.keyword}" if problem.keyword else ""
            raise Unenforceable(problem.why, path, problem.keyword) from None

    def _complete_cases(self, state: State) -> Cases:
        cases = self._normal.cases(state)
        return {**cases, "object": tuple(self._complete(case) for case in cases["object"])}

    def _complete(self, case: Case) -> Case:
        """An object whose required members all have a demand of their own, and whose patterns do not overlap."""
        if not isinstance(case, Object):
            return case
        for first, second in combinations(case.patterns, 2):
            if not self._patterns.disjoint(first, second):
                raise Unenforceable(
                    f"the patterns {first[:64]!r} and {second[:64]!r} of names overlap", None, "patternProperties"
                )
        for name in (*case.members, *case.required):
            writable(name)
        missing = {name: held(case, name, self._patterns) for name in case.required if name not in case.members}
        return replace(case, members={**case.members, **missing})

    def _grow(self) -> None:
        """Find the states that some finite value satisfies."""
        grown = True
        while grown:
            fresh = {
                state for state in self._cases if state not in self._fertile and self._blaming(state, self._any_value, state)
            }  # fmt: skip
            self._fertile |= fresh
            grown = bool(fresh)

    def _any_value(self, state: State) -> bool:
        return any(self._possible(case) for group in self._cases[state].values() for case in group)

    def _possible(self, case: Case) -> bool:
        match case:
            case Array():
                return self._longest(case) >= case.least
            case Object():
                return next(self._counted(case), None) is not None
        return True

    def _longest(self, case: Array) -> float:
        """The most items that an array can have."""
        for index, state in enumerate(case.first):
            if state not in self._fertile:
                return min(index, case.most)
        return case.most if case.rest in self._fertile else min(len(case.first), case.most)

    def _schema(self, state: State) -> dict[str, Any] | bool:
        """The schema of a state, by reference where it is used more than once."""
        if state not in self._fertile:
            return False
        if self._cases[state] == ALL:
            return True
        if self._uses[state] == 1:
            return self._blaming(state, self._body, state)
        name = self._names.get(state)
        if name is None:
            name = self._names[state] = f"s{len(self._names)}"
            self._shared[name] = self._blaming(state, self._body, state)
        return {"$ref": f"#/$defs/{name}"}

    def _body(self, state: State) -> dict[str, Any]:
        values: list[Any] = []
        alone: list[dict[str, Any]] = []
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for kind, cases in self._cases[state].items():
            for case in cases:
                found = _values(case)
                if found is not None:
                    values += found
                    continue
                for limits in self._limits(case):
                    name = "integer" if isinstance(case, Number) and case.integer else kind
                    if limits.keys() & {"allOf", "enum"}:
                        alone.append({"type": name, **limits})
                    else:
                        by_kind.setdefault(kind, []).append({"type": name, **limits})
        ways = [{"enum": values}] if values else []
        ways += alone
        ways += [_joined([limits for limits in row if limits]) for row in zip_longest(*by_kind.values())]
        return ways[0] if len(ways) == 1 else {"anyOf": ways}

    def _limits(self, case: Case) -> Iterator[dict[str, Any]]:
        """The keywords of one case, or of several that are together what it is."""
        match case:
            case Number():
                yield self._number(case)
            case Text():
                yield _text(case)
            case Array() if self._possible(case):
                yield self._array(case)
            case Object():
                yield from (self._object(case, *chosen) for chosen in self._counted(case))
            case Null() | Boolean():
                yield {}

    def _number(self, case: Number) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if case.low > -inf:
            found["exclusiveMinimum" if case.low_open else "minimum"] = case.low
        if case.high < inf:
            found["exclusiveMaximum" if case.high_open else "maximum"] = case.high
        if case.step is not None:
            # In lowest terms, the numerator is the least whole multiple.
            step = Fraction(case.step.numerator) if case.integer else case.step
            self._steps += int(str(step.numerator).rstrip("0"))
            found["multipleOf"] = int(step) if step.denominator == 1 else float(step)
            if Fraction(str(found["multipleOf"])) != step or self._steps > _STEPS:
                raise Unenforceable("its steps are too many, or no short decimal numbers", None, "multipleOf")
        return found

    def _array(self, case: Array) -> dict[str, Any]:
        longest = self._longest(case)
        found: dict[str, Any] = {}
        first = case.first[: None if longest == inf else int(longest)]
        if first:
            found["prefixItems"] = [self._schema(state) for state in first]
        rest = self._schema(case.rest) if longest > len(first) else False
        if rest is not True:
            found["items"] = rest
        if case.least:
            found["minItems"] = case.least
        if longest < inf and not (rest is False and longest == len(first)):
            found["maxItems"] = int(longest)
        return found

    def _counted(self, case: Object) -> Iterator[tuple[tuple[str, ...], frozenset[str], int, float]]:
        """Ways to keep the number of members: names that are required, names that must not occur, and limits for the rest."""
        members = {name for name, state in case.members.items() if state in self._fertile}
        if not members.issuperset(case.required):
            return
        optional = [name for name in case.members if name in members and name not in case.required]
        more = case.rest in self._fertile or any(state in self._fertile for state in case.patterns.values())
        if case.least <= len(case.required) and case.most == inf:
            yield case.required, frozenset(), 0, inf
            return
        if 2 ** len(optional) > _SUBSETS:
            raise Unenforceable(
                "the number of members is limited, and too many of them are optional", None, "minProperties"
            )
        for count in range(len(optional) + 1):
            for chosen in combinations(optional, count):
                required = (*case.required, *chosen)
                if len(required) > case.most or (len(required) < case.least and not more):
                    continue
                if case.least > len(required) + 1 and more:
                    raise Unenforceable("members whose names are not told may repeat", None, "minProperties")
                least = case.least if case.least > len(required) else 0
                yield required, frozenset(optional) - set(chosen), least, case.most if more else inf

    def _object(
        self, case: Object, required: tuple[str, ...], out: frozenset[str], least: int, most: float
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if case.members:
            found["properties"] = {
                name: False if name in out else self._schema(state) for name, state in case.members.items()
            }
        patterns = {pattern: self._schema(state) for pattern, state in case.patterns.items()}
        if patterns:
            found["patternProperties"] = patterns
        rest = self._schema(case.rest)
        if rest is not True:
            found["additionalProperties"] = rest
        if required:
            found["required"] = list(required)
        if least:
            found["minProperties"] = least
        if most < inf:
            found["maxProperties"] = int(most)
        return found


def _inner(cases: Cases) -> Iterator[State]:
    for case in (case for group in cases.values() for case in group):
        match case:
            case Array():
                yield from (*case.first, case.rest)
            case Object():
                yield from (*case.members.values(), *case.patterns.values(), case.rest)


def _values(case: Case) -> list[Any] | None:
    """All values of a case, where there are few; None for others."""
    match case:
        case Boolean() if len(case.values) == 1:
            return list(case.values)
        case Number() if case.low == case.high:
            value = case.low
            return [int(value) if value == int(value) else value]
        case Text() if case.values is not None and not case.formats:
            return sorted(case.values)
    return None


def _text(case: Text) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if case.values is not None:
        found["enum"] = sorted(case.values)
    if case.least:
        found["minLength"] = case.least
    if case.most < inf:
        found["maxLength"] = int(case.most)
    patterns = sorted(case.patterns) + ([other_than(case.banned)] if case.banned else [])
    formats = sorted(case.formats)
    if patterns:
        found["pattern"] = patterns[0]
    if formats:
        found["format"] = formats[0]
    more = [{"pattern": pattern} for pattern in patterns[1:]] + [{"format": name} for name in formats[1:]]
    return {**found, "allOf": more} if more else found


def _joined(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One schema of limits of different types, each of which binds its own type only."""
    kinds = [part["type"] for part in parts]
    found: dict[str, Any] = (
        {} if len(kinds) == len(ALL) and "integer" not in kinds else {"type": kinds[0] if len(kinds) == 1 else kinds}
    )
    for part in parts:
        found |= {key: value for key, value in part.items() if key != "type"}
    return found
