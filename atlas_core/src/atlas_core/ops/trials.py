"""Pairs of conformance cases: a graph captured while the first lies in memory must serve the second."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from atlas_core.ops.contract import Case
from atlas_core.vocab.dtype import DType

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
Shape = tuple[int | str, ...]
Shapes = Mapping[str, Shape]


class Trial(Struct, frozen=True):
    """Two cases with equal attrs, weights and fixed shapes; live counts and everything else differ.

    ``spare`` is by how much the bucket exceeds the larger of both; with 0 the larger one fills it.
    """

    first: Case
    second: Case
    spare: int = 2

    @property
    def label(self) -> str:
        """What prints in test ids."""
        return self.first.label


Generate = Callable[[Rng, bool], Iterator[Trial]]
"""(random numbers, large) → trials; ``large`` asks for sizes worth timing instead of sizes worth testing."""


class Live(Struct, frozen=True):
    """Live counts of one case."""

    tokens: int
    sequences: int
    rows: int
    max_query: int

    @classmethod
    def decode(cls, rows: int) -> "Live":
        """One token of each of ``rows`` sequences, each wanting logits."""
        return cls(rows, rows, rows, 1)

    @classmethod
    def prefill(cls, tokens: int) -> "Live":
        """One sequence that brings ``tokens`` tokens and wants logits of the last."""
        return cls(tokens, 1, 1, max(tokens, 2))

    @classmethod
    def mixed(cls, rows: int) -> "Live":
        """``rows`` rows of logits out of a ragged step with more tokens than that."""
        return cls(3 * rows + 4, rows + 1, rows, 3 * rows + 4)


def pair(
    label: str, lives: tuple[Live, Live], shapes: Shapes, make: Callable[[Live], dict[str, Array]],
    fixed: Mapping[str, Array] | None = None, attrs: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, DType] | None = None,
) -> Trial:  # fmt: skip
    """A trial from one maker of arrays that depend on the live counts, and ``fixed`` ones that both cases share."""
    longest = max(live.max_query for live in lives)
    first, second = (
        Case(
            label, {**(fixed or {}), **make(live)}, attrs or {}, live.tokens, live.sequences, live.rows,
            max_query=longest, shapes=shapes, dtypes=dtypes or {},
        )
        for live in lives
    )  # fmt: skip
    return Trial(first, second)


def normal(rng: Rng, *shape: int, scale: float = 1.0) -> Array:
    """float32 normal values."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)
