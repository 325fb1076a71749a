"""Percentiles, the one way in which distributions are summed up. Pure."""

from collections.abc import Sequence
from math import floor, fsum

from msgspec import Struct


class Distribution(Struct, frozen=True):
    """What is told of a number of values; every field but ``count`` is in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``ordered`` lies, by linear interpolation between the two nearest ranks.

    Type 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages", 1996: numpy's default. ``ordered`` is ascending and
    finite. Raises ValueError when it is empty or ``share`` is out of range.
    """
    if not ordered:
        raise ValueError("there is no percentile of nothing")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a share is from 0 to 1, not {share}")
    position = share * (len(ordered) - 1)
    below = floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    weight = position - below
    # Between the two whatever the rounding: a percentile is never outside what it describes.
    return min(max(low * (1.0 - weight) + high * weight, low), high)


def describe(values: Sequence[float]) -> Distribution | None:
    """The distribution of ``values``, in any order; None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Distribution(len(ordered), fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])
