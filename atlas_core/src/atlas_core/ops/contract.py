"""What an op is: named operands, constants, and a numpy reference that defines it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from msgspec import Struct, field

from atlas_core.vocab.dtype import DType

Role = Literal["in", "out", "inout"]
Kind = Literal["activation", "weight", "constant", "cache", "input", "state"]
Arrays = dict[str, np.ndarray]
Reference = Callable[[Arrays, Mapping[str, Any]], None]


class Operand(Struct, frozen=True):
    """One operand.

    ``kind``: an *activation* lives in the arena; a *weight* comes from the checkpoint and may be packed; a *constant* is computed by
    the model plugin at load; an *input* is written by the host before each step; a *state* and a *cache* outlive the step.
    ``dtype`` None means the model's activation type. Inputs, states and caches are read from device memory at replay, so
    they may change between replays of one graph; everything else is fixed at capture.
    """

    name: str
    kind: Kind
    role: Role = "in"
    dtype: DType | None = None


class Tolerance(Struct, frozen=True):
    """|got - want| ≤ absolute + relative * |want| + of_row * (root mean square of the wanted row). All zero: equal bits."""

    relative: float
    absolute: float
    of_row: float = 0.0


class Case(Struct, frozen=True):
    """One conformance case: arrays of every input, state and weight operand (float32 where the op is in float), and constants.

    ``label`` prints in test ids. ``tokens``, ``sequences``, ``rows``, ``updates`` are the live counts; buffers may be larger.
    ``max_query`` is the longest query. ``shapes`` gives every operand's shape with T, S, S+1, R, U for what is live (a cache
    without its pages, as in OperandSpec); ``dtypes`` the type of an activation that is not of the activation type.
    """

    label: str
    arrays: Mapping[str, np.ndarray]
    attrs: Mapping[str, Any]
    tokens: int
    sequences: int = 1
    rows: int = 0
    updates: int = 0
    max_query: int = 1
    shapes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, DType] = field(default_factory=dict)


class Op(Struct, frozen=True):
    """A primitive op.

    ``reference(arrays, attrs)`` reads live extents of the operands as numpy arrays (float32 for floating operands; caches as
    [layer, page, 2, head, token, dim]), stores ``out`` operands into ``arrays`` and changes ``inout`` ones in place.
    ``attrs`` names the constants every node must give (all fixed at capture). ``tolerances`` is keyed by activation type.
    ``fast_of_row`` is what fast numerics in float32 may add to a tolerance's ``of_row``: activations rounded to 8 bits err in
    proportion to the whole row, and so do factors of attention rounded to bfloat16. Narrower activation types have tolerances of their own.
    ``within`` tells that parts of a fused op hand on activations of no fixed type, whatever the type of its operands.
    ``flops`` and ``bytes`` take (shapes, attrs) and count one execution at these shapes; bytes exclude packed weights.
    """

    name: str
    operands: tuple[Operand, ...]
    attrs: tuple[str, ...]
    reference: Reference
    tolerances: Mapping[DType, Tolerance] = field(default_factory=dict)
    flops: Callable[[Mapping[str, tuple[int, ...]], Mapping[str, Any]], int] = lambda shapes, attrs: 0
    summary: str = ""
    fast_of_row: float = 0.0
    within: bool = False

    def operand(self, name: str) -> Operand:
        """The operand called ``name``. Raises KeyError."""
        for operand in self.operands:
            if operand.name == name:
                return operand
        raise KeyError(f"{self.name} has no operand {name}")


class OpSet(Mapping[str, Op]):
    """Ops by name; plugins' ops are named ``dist:op``."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self._ops: dict[str, Op] = {}
        for op in ops:
            if op.name in self._ops:
                raise ValueError(f"op {op.name} is declared twice")
            self._ops[op.name] = op

    def __getitem__(self, name: str) -> Op:
        return self._ops[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)
