"""Comparing what a kernel left in memory with what the reference says."""

from typing import Any

import numpy as np

from atlas_core.ops.contract import Tolerance

Array = np.ndarray[Any, Any]


def mismatch(name: str, got: Array, want: Array, tolerance: Tolerance) -> str | None:
    """A sentence about the worst element that is off, or None. Integers must be equal; equal infinities are equal."""
    if got.dtype.kind in "iub":
        bad = got != want
        return _tell(name, got, want, bad, np.abs(got.astype(np.int64) - want.astype(np.int64))) if bad.any() else None
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(got == want, 0.0, np.abs(got - want))
        row = np.sqrt(np.mean(want * want, axis=-1, keepdims=True)) if tolerance.of_row and want.size else 0.0
        allowed = tolerance.absolute + tolerance.relative * np.abs(want) + tolerance.of_row * row
        bad = ~(error <= allowed) & ~((got == want) | (np.isnan(got) & np.isnan(want)))
    if not bad.any():
        return None
    limit = f"; allowed {tolerance.absolute:g} + {tolerance.relative:g}·|expected|"
    limit += f" + {tolerance.of_row:g}·(root mean square of the row)" if tolerance.of_row else ""
    return _tell(name, got, want, bad, np.where(np.isnan(error), np.inf, error)) + limit


def changed(name: str, got: Array, before: Array) -> str | None:
    """A sentence about the first byte pattern that should not have changed and did, or None. Compares bits."""
    bad = _bits(got) != _bits(before)
    if not bad.any():
        return None
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    return (
        f"{name}{list(place)} was {before[place]} and became {got[place]}: it must not be touched"
        f" ({int(bad.sum())} such elements)"
    )


def same(a: Array, b: Array) -> Array:
    """Where two arrays have equal bits."""
    equal: Array = _bits(a) == _bits(b)
    return equal


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


def _tell(name: str, got: Array, want: Array, bad: Array, error: Array) -> str:
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.where(bad, error, -1.0))), got.shape))
    unwritten = " (NaN: never written, or made from padding)" if got.dtype.kind == "f" and np.isnan(got[place]) else ""
    return f"{name}{list(place)} is {got[place]:.9g}{unwritten}, expected {want[place]:.9g}; {int(bad.sum())} of {bad.size} are off"
