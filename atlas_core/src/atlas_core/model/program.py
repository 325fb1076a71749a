"""A step program: primitive ops over named values, in the order in which a model recorded them.

Shapes may name the live extents of a step: T tokens, S sequences, S+1 (offsets), R rows of logits, U updates.
A program has segments, run as one graph each: ``forward`` (tokens to logits) and ``sample`` (logits to the next token).
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from msgspec import Struct, field

from atlas_core.ops.contract import Kind, Op
from atlas_core.vocab.dtype import DType

Dim = int | Literal["T", "S", "S+1", "R", "U"]


class Value(Struct, frozen=True):
    """One named value. ``dtype`` is None for weights (their storage decides) and caches (the cache layout decides)."""

    name: str
    kind: Kind
    shape: tuple[Dim, ...]
    dtype: DType | None = None


class Node(Struct, frozen=True):
    """One recorded op: ``operands`` by the op's operand names, ``attrs`` complete."""

    op: Op
    operands: Mapping[str, Value]
    attrs: Mapping[str, Any]

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Values that this node creates."""
        return tuple(self.operands[o.name] for o in self.op.operands if o.role == "out")


class Segment(Struct, frozen=True):
    """Nodes [start, end) that are captured as one graph."""

    name: str
    start: int
    end: int


class Program(Struct, frozen=True):
    """A finished record. ``results`` keep their memory to the end; ``constants`` are arrays computed by the model."""

    nodes: tuple[Node, ...]
    segments: tuple[Segment, ...]
    results: tuple[Value, ...]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def choices(self) -> tuple[Value, ...]:
        """What routers choose: the experts of each mixture, [T, chosen] int32."""
        return tuple(value for node in self.nodes for value in node.outputs if node.operands.get("experts") == value)

    def weights(self) -> tuple[Value, ...]:
        """Every weight, in order of first use."""
        seen: dict[str, Value] = {}
        for node in self.nodes:
            for value in node.operands.values():
                if value.kind == "weight":
                    seen.setdefault(value.name, value)
        return tuple(seen.values())


class Recorder:
    """Collects nodes; checks that operands, constants and shapes are what the op declares."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._segments: list[Segment] = []
        self._values: dict[str, Value] = {}
        self._constants: dict[str, np.ndarray] = {}

    def value(self, name: str, kind: Kind, shape: tuple[Dim, ...], dtype: DType | None = None) -> Value:
        """The value called ``name``, made on first use. Raises ValueError when it exists with another meaning."""
        value = Value(name, kind, shape, dtype)
        known = self._values.setdefault(name, value)
        if known != value:
            raise ValueError(f"{name} was {known} and is now {value}")
        return known

    def fresh(self, stem: str, shape: tuple[Dim, ...], dtype: DType) -> Value:
        """A new activation."""
        return self.value(f"{stem}.{len(self._nodes)}", "activation", shape, dtype)

    def constant(self, name: str, array: np.ndarray) -> Value:
        """A float32 array that the model computes; equal names must bring equal arrays."""
        array = np.ascontiguousarray(array, np.float32)
        known = self._constants.setdefault(name, array)
        if not np.array_equal(known, array):
            raise ValueError(f"constant {name} is recorded with two different contents")
        return self.value(name, "constant", array.shape, DType.F32)

    def node(self, op: Op, operands: Mapping[str, Value], attrs: Mapping[str, Any]) -> None:
        """Append a node. Raises ValueError unless operands and attrs are exactly those of the op, kinds and dtypes included."""
        if set(operands) != {o.name for o in op.operands} or set(attrs) != set(op.attrs):
            raise ValueError(
                f"{op.name} takes {[o.name for o in op.operands]} and {op.attrs}, got {[*operands]} and {[*attrs]}"
            )
        for operand in op.operands:
            value = operands[operand.name]
            if value.kind != operand.kind or (operand.dtype and value.dtype != operand.dtype):
                raise ValueError(f"operand {operand.name} of {op.name} is {operand}, got {value}")
        self._nodes.append(Node(op, dict(operands), dict(attrs)))

    def end_segment(self, name: str) -> None:
        """Close the segment that began at the previous one's end."""
        start = self._segments[-1].end if self._segments else 0
        self._segments.append(Segment(name, start, len(self._nodes)))

    def finish(self, results: tuple[Value, ...]) -> Program:
        """The program. Raises ValueError when nodes are outside every segment."""
        if not self._segments or self._segments[-1].end != len(self._nodes):
            raise ValueError("the last segment was not ended")
        return Program(tuple(self._nodes), tuple(self._segments), results, dict(self._constants))
