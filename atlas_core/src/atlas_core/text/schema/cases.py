"""Sets of values of one JSON type, by the limits that they keep. Two of them are met exactly, or not at all."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, inf, lcm
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from atlas_core.text.schema.document import Node, Scope
from atlas_core.text.schema.keywords import Unenforceable

MAX_PATTERNS = 4
"""Regular expressions that one text is held to: what the compiler does with all together grows exponentially."""

Literal = tuple[Node, bool, Scope]
"""A schema, whether it must hold or must not, and the scope in which it stands."""
State = frozenset[Literal]
"""What must hold of one value, all of it; empty: nothing."""
ANY: State = frozenset()


class Patterns(Protocol):
    """What is known of regular expressions, searched for in a text."""

    def error(self, pattern: str) -> str:
        """What is wrong with it, or nothing."""
        ...

    def matches(self, patterns: Sequence[str], text: str) -> bool:
        """Whether ``text`` has all of them."""
        ...

    def disjoint(self, first: str, second: str) -> bool:
        """Whether no text has both."""
        ...


class Null(Struct, frozen=True):
    """null."""


class Boolean(Struct, frozen=True):
    """Truth values."""

    values: frozenset[bool] = frozenset({False, True})


class Number(Struct, frozen=True):
    """Numbers from ``low`` to ``high``, each included unless it is ``open``; multiples of ``step``."""

    low: float = -inf
    high: float = inf
    low_open: bool = False
    high_open: bool = False
    integer: bool = False
    step: Fraction | None = None

    @property
    def empty(self) -> bool:
        """Whether no number is left."""
        if self.low > self.high or (self.low == self.high and (self.low_open or self.high_open)):
            return True
        step = _both_steps(self.step, Fraction(1) if self.integer else None)
        if step is None or self.low == -inf or self.high == inf:
            return False
        low, high = Fraction(str(self.low)) / step, Fraction(str(self.high)) / step
        first = floor(low) + 1 if self.low_open else ceil(low)
        last = ceil(high) - 1 if self.high_open else floor(high)
        return first > last


class Text(Struct, frozen=True):
    """Strings of ``least`` to ``most`` characters that have all ``patterns``: one of ``values``, unless that is None, none of ``banned``."""

    least: int = 0
    most: float = inf
    patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    values: frozenset[str] | None = None
    banned: frozenset[str] = frozenset()


class Array(Struct, frozen=True):
    """Lists of ``least`` to ``most`` items: those of ``first``, then any number of ``rest``. ``seen`` of them are evaluated."""

    first: tuple[State, ...] = ()
    rest: State = ANY
    least: int = 0
    most: float = inf
    seen: float = 0

    def item(self, index: int) -> State:
        """What must hold of an item."""
        return self.first[index] if index < len(self.first) else self.rest


class Object(Struct, frozen=True):
    """Objects of ``least`` to ``most`` members, all of ``required`` among them.

    A member is held to ``members`` by its name, else to all of ``patterns`` that its name has, else to ``rest``. ``seen`` names and
    ``seen_patterns`` are evaluated, or (``seen_all``) everything.
    """

    members: Mapping[str, State] = field(default_factory=dict)
    patterns: Mapping[str, State] = field(default_factory=dict)
    rest: State = ANY
    required: tuple[str, ...] = ()
    least: int = 0
    most: float = inf
    seen: frozenset[str] = frozenset()
    seen_patterns: frozenset[str] = frozenset()
    seen_all: bool = False

    def __hash__(self) -> int:
        return hash((tuple(self.members), tuple(self.patterns), self.rest, self.required, self.least, self.most))


Case = Null | Boolean | Number | Text | Array | Object
KINDS: Mapping[str, Case] = {
    "null": Null(), "boolean": Boolean(), "number": Number(), "string": Text(), "array": Array(), "object": Object(),
}  # fmt: skip
"""Everything of each type."""


Cases = Mapping[str, tuple[Case, ...]]
"""Alternatives by type."""
ALL: Cases = {kind: (case,) for kind, case in KINDS.items()}
NONE: Cases = dict.fromkeys(KINDS, ())
NEVER: State = frozenset({(Node(False, "#", ""), True, ())})
"""Nothing holds."""


def only(kind: str, *cases: Case) -> Cases:
    """Alternatives of one type."""
    return {**NONE, kind: cases}


def absent(name: str) -> Object:
    """Objects without a member."""
    return Object({name: NEVER})


def meet(one: Case, other: Case, known: Patterns) -> Case | None:
    """The values in both, which are of one type; None when there are none. Raises Unenforceable."""
    match one, other:
        case Null(), Null():
            return one
        case Boolean(), Boolean():
            values = one.values & other.values
            return Boolean(values) if values else None
        case Number(), Number():
            return _numbers(one, other)
        case Text(), Text():
            return _texts(one, other, known)
        case Array(), Array():
            return _arrays(one, other)
        case Object(), Object():
            return _objects(one, other, known)
    raise TypeError(f"{type(one).__name__} and {type(other).__name__} do not meet")


def _numbers(one: Number, other: Number) -> Number | None:
    low, low_open = max((one.low, one.low_open), (other.low, other.low_open))
    high, high_closed = min((one.high, not one.high_open), (other.high, not other.high_open))
    found = Number(
        low, high, low_open, not high_closed, one.integer or other.integer, _both_steps(one.step, other.step)
    )
    return None if found.empty else found


def _both_steps(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    if one is None or other is None:
        return one or other
    return Fraction(
        lcm(one.numerator * other.denominator, other.numerator * one.denominator), one.denominator * other.denominator
    )


def _texts(one: Text, other: Text, known: Patterns) -> Text | None:
    if len(one.patterns | other.patterns) > MAX_PATTERNS:
        raise Unenforceable(f"more than {MAX_PATTERNS} regular expressions meet in one text")
    values = one.values if other.values is None else other.values if one.values is None else one.values & other.values
    found = Text(
        max(one.least, other.least), min(one.most, other.most), one.patterns | other.patterns, one.formats | other.formats,
        values, one.banned | other.banned,
    )  # fmt: skip
    if values is None:
        return None if found.least > found.most else found
    # Patterns are done with once they have been tried; a format has no pattern that could be.
    left = frozenset(
        value for value in values
        if value not in found.banned and found.least <= len(value) <= found.most and known.matches(sorted(found.patterns), value)
    )  # fmt: skip
    return Text(values=left, formats=found.formats) if left else None


def _arrays(one: Array, other: Array) -> Array | None:
    count = max(len(one.first), len(other.first))
    found = Array(
        tuple(one.item(index) | other.item(index) for index in range(count)), one.rest | other.rest,
        max(one.least, other.least), min(one.most, other.most), max(one.seen, other.seen),
    )  # fmt: skip
    return None if found.least > found.most else found


def _objects(one: Object, other: Object, known: Patterns) -> Object | None:
    members = {
        name: held(one, name, known) | held(other, name, known)
        for name in dict.fromkeys((*one.members, *other.members))
    }
    patterns = {}
    for pattern in dict.fromkeys((*one.patterns, *other.patterns)):
        patterns[pattern] = _pattern(one, other, pattern, known) | _pattern(other, one, pattern, known)
    required = tuple(dict.fromkeys((*one.required, *other.required)))
    found = Object(
        members, patterns, one.rest | other.rest, required, max(one.least, other.least), min(one.most, other.most),
        one.seen | other.seen, one.seen_patterns | other.seen_patterns, one.seen_all or other.seen_all,
    )  # fmt: skip
    return None if max(found.least, len(required)) > found.most else found


def _pattern(own: Object, other: Object, pattern: str, known: Patterns) -> State:
    """What ``own`` asks of a member whose name has ``pattern``, a pattern of either."""
    if pattern in own.patterns:
        return own.patterns[pattern]
    # Names that have both patterns are held to both, and those are no set that could be named.
    if any(not known.disjoint(pattern, one) for one in own.patterns):
        raise Unenforceable("patterns of names that overlap meet")
    return own.rest


def held(one: Object, name: str, known: Patterns) -> State:
    """What must hold of the member ``name``."""
    if name in one.members:
        return one.members[name]
    found = [state for pattern, state in one.patterns.items() if known.matches([pattern], name)]
    return frozenset().union(*found) if found else one.rest


def without_sight(one: Case) -> Case:
    """The same values, with nothing said about what was evaluated."""
    match one:
        case Array():
            return replace(one, seen=0)
        case Object():
            return replace(one, seen=frozenset(), seen_patterns=frozenset(), seen_all=False)
    return one
