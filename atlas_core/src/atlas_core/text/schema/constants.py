"""Single values, and everything but them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from atlas_core.text.schema.cases import (
    ALL,
    ANY,
    NEVER,
    Array,
    Boolean,
    Case,
    Cases,
    Null,
    Number,
    Object,
    State,
    Text,
    absent,
)
from atlas_core.text.schema.keywords import Unenforceable, number
from atlas_core.text.schema.names import writable

Inner = Callable[[Any, bool], State]
"""The demand that an item or member is a value, or is not."""


def values(listed: Sequence[Any], holds: bool, inner: Inner) -> Cases:
    """One of ``listed`` where that ``holds``, else anything else."""
    kinds = {name: [value for value in listed if _kind(value) == name] for name in ALL}
    if holds:
        return {name: tuple(_are(name, found, inner)) for name, found in kinds.items()}
    return {name: tuple(_are_not(name, found, inner)) if found else ALL[name] for name, found in kinds.items()}


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _are(kind: str, found: Sequence[Any], inner: Inner) -> Iterable[Case]:
    if not found:
        return ()
    match kind:
        case "null":
            return (Null(),)
        case "boolean":
            return (Boolean(frozenset(found)),)
        case "number":
            return [Number(value, value) for value in dict.fromkeys(map(_bounded, found))]
        case "string":
            return (Text(values=frozenset(map(writable, found))),)
        case "array":
            return [Array(tuple(inner(item, True) for item in value), NEVER, len(value), len(value)) for value in found]
    return [
        Object({name: inner(item, True) for name, item in value.items()}, rest=NEVER, required=tuple(value))
        for value in found
    ]


def _are_not(kind: str, found: Sequence[Any], inner: Inner) -> Iterable[Case]:
    match kind:
        case "null":
            return ()
        case "boolean":
            left = frozenset({False, True} - set(found))
            return (Boolean(left),) if left else ()
        case "number":
            return _gaps(sorted(set(map(_bounded, found))))
        case "string":
            return (Text(banned=frozenset(map(writable, found))),)
    if len(found) > 1:
        raise Unenforceable("the contrary of several arrays or objects cannot be enforced")
    return _other_arrays(found[0], inner) if kind == "array" else _other_objects(found[0], inner)


def _bounded(value: float) -> float:
    problem = number(value)
    if problem:
        raise Unenforceable(problem)
    return value


def _gaps(numbers: Sequence[float]) -> Iterator[Number]:
    """The numbers between ``numbers``, which ascend."""
    left = Number()
    for value in numbers:
        yield replace(left, high=value, high_open=True)
        left = Number(low=value, low_open=True)
    yield left


def _other_arrays(value: Sequence[Any], inner: Inner) -> Iterator[Array]:
    if value:
        yield Array(most=len(value) - 1)
    yield Array(least=len(value) + 1)
    for index, item in enumerate(value):
        yield Array((*(ANY,) * index, inner(item, False)), least=index + 1)


def _other_objects(value: dict[str, Any], inner: Inner) -> Iterator[Object]:
    for name, item in value.items():
        yield absent(name)
        yield Object({name: inner(item, False)}, required=(name,))
    yield Object(required=tuple(value), least=len(value) + 1)
