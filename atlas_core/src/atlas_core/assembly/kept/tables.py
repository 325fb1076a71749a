"""A plan as tables: what many nodes have in common is there once, and functions are there by name."""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from atlas_core.contracts.ops import KVLayout, OperandSpec, Packed
from atlas_core.model.arena import Arena
from atlas_core.model.builder import StepLayout
from atlas_core.model.planner import Bucket
from atlas_core.model.program import Segment, Value
from atlas_core.settings import Settings
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.resolve import Candidate

T = TypeVar("T")
Names = tuple[str, ...]


class NodeRow(Struct, array_like=True, frozen=True):
    """``names`` of operands (a row of names), ``operands`` (rows of values) and ``attrs`` (a row of attrs)."""

    op: str
    names: int
    operands: tuple[int, ...]
    attrs: int


class NeedRow(Struct, array_like=True, frozen=True):
    """An OpNeed; ``specs`` are rows of specs by ``names``."""

    op: str
    names: int
    specs: tuple[int, ...]
    attrs: int
    arch: str
    numerics: str
    tokens: int
    sequences: int
    rows: int
    max_query: int
    kv: str | None
    activation: DType | None
    processors: int | None


class StepRow(Struct, array_like=True, frozen=True):
    """A Step: rows of nodes, needs, packings, names and candidates; ``packed`` are the operands that ``packings`` are of."""

    node: int
    need: int
    implementation: str
    packed: int
    packings: tuple[int, ...]
    parts: tuple[int, int]
    replaces: int
    rejected: tuple[int, ...]


class BucketRow(Struct, array_like=True, frozen=True):
    """A PlannedBucket; ``segments`` are names with rows of steps."""

    bucket: Bucket
    segments: tuple[tuple[str, tuple[int, ...]], ...]
    arena: Arena


class Rows(Struct, array_like=True, frozen=True):
    """Every row once."""

    names: tuple[Names, ...]
    attrs: tuple[dict[str, Any], ...]
    values: tuple[Value, ...]
    specs: tuple[OperandSpec, ...]
    packings: tuple[Packed, ...]
    candidates: tuple[Candidate, ...]
    layouts: tuple[StorageLayout, ...]
    nodes: tuple[NodeRow, ...]
    needs: tuple[NeedRow, ...]
    steps: tuple[StepRow, ...]


class Tables(Struct, array_like=True, frozen=True):
    """A StepPlan. ``recorded`` are rows of nodes, ``results`` of values; ``chosen`` are (weight, primitive, row of packings)."""

    settings: Settings
    max_seq_len: int
    layout: StepLayout
    rows: Rows
    recorded: tuple[int, ...]
    segments: tuple[Segment, ...]
    results: tuple[int, ...]
    constants: tuple[tuple[str, tuple[int, ...], bytes], ...]
    buckets: tuple[BucketRow, ...]
    chosen: tuple[tuple[str, str, int], ...]
    caches: dict[str, KVLayout]
    weights: tuple[tuple[str, int], ...]


class Table(Generic[T]):
    """One table while it is made; rows are known by their bytes."""

    def __init__(self) -> None:
        self.rows: list[T] = []
        self._known: dict[bytes, int] = {}

    def of(self, row: T) -> int:
        """Where the row is."""
        key = msgspec.msgpack.encode(row)
        place = self._known.setdefault(key, len(self.rows))
        if place == len(self.rows):
            self.rows.append(row)
        return place

    def all(self, rows: Iterable[T]) -> tuple[int, ...]:
        """Where these rows are."""
        return tuple(map(self.of, rows))


def plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes, if they come back as they are. Raises TypeError for others, of a plugin's own kind."""
    for name, value in attrs.items():
        if not _plain(value):
            raise TypeError(f"the attribute {name} is {value!r}")
    return dict(attrs)


def restored(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What ``plain`` was given: lists were tuples."""
    return {name: _tuple(value) for name, value in attrs.items()}


def _plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str) or (type(value) is tuple and all(map(_plain, value)))


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
