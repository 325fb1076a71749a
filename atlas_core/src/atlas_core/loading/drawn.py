"""Values of weights that nobody trained: of the sizes and spreads of a model that has just been initialised.

Activations keep a deviation of about 1 all the way, so that a step is as well conditioned as one of a trained model, and two ways
of computing it can be compared: matrices keep the variance of their inputs, what a layer adds to the residual stream is RESIDUAL of
it, router logits have a deviation of ROUTER (flat routers hang on rounding: one expert taken for another changes a token's whole
way through the layers above it). Rates and biases of decays are those that Gated DeltaNet begins with (Yang et al., 2024; as in
Mamba 2, Dao and Gu, 2024): rates exp(a_log) uniform up to 16, steps softplus(dt_bias) from 0.001 to 0.1, by their logarithm.

Matrices are stretches of one pool of normal values for each deviation, so that a device that was given the pool makes them by copies.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from math import log
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from atlas_core.ops.arrays import numpy_dtype
from atlas_core.vocab.dtype import DType

RESIDUAL, ROUTER, HEAD = 0.5, 4.0, 1.5
"""Standard deviations: of what a layer adds to a stream of 1, about; of router logits; of logits."""
POOL = 1 << 23
"""Values in a pool."""
_CHUNK, _ALIGNED = 1 << 20, 256  # values in a row; multiples of which they begin at, as fast copies want
_INTO_RESIDUAL = (".o", ".down")
_VECTOR = 0.1
_MOST_RATE, _STEPS = 16.0, (0.001, 0.1)


class Stretch(Struct, frozen=True):
    """``count`` values of the pool of ``deviation``, from ``start`` on."""

    deviation: float
    start: int
    count: int


@runtime_checkable
class Drawing(Protocol):
    """What a Checkpoint whose tensors are made up offers besides."""

    def stretches(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> list[Stretch] | None:
        """What ``read`` puts one behind another; None for a tensor that is not made of stretches."""
        ...


def deviation(name: str, shape: tuple[int, ...], *, tied: bool = False) -> float:
    """Of a matrix with this canonical name, [..., rows, summed] (convolutions: [channels, taps]).

    ``tied``: it is the embedding and the head at once. Then logits count, since a norm follows the embedding anyway.
    """
    if name == "embed" and not tied:
        return 1.0
    head = name in {"embed", "head"}
    factor = (
        HEAD if head else RESIDUAL if name.endswith(_INTO_RESIDUAL) else ROUTER if name.endswith(".router") else 1.0
    )
    return float(factor * shape[-1] ** -0.5)


def vector(seed: int, name: str, size: int) -> npt.NDArray[np.float32]:
    """float32 [size] for the canonical ``name``: decays as above, norms near 1, biases near 0."""
    rng = np.random.default_rng(int.from_bytes(_digest(seed, name, -1), "little"))
    if name.endswith("a_log"):
        return np.log(rng.uniform(1e-2, _MOST_RATE, size)).astype(np.float32)
    if name.endswith("dt_bias"):
        step = np.exp(rng.uniform(log(_STEPS[0]), log(_STEPS[1]), size))
        return (step + np.log(-np.expm1(-step))).astype(np.float32)  # softplus of which is the step
    return (float(name.endswith("norm")) + rng.standard_normal(size) * _VECTOR).astype(np.float32)


def stretches(seed: int, tensor: str, spread: float, first: int, count: int) -> Iterator[Stretch]:
    """The values [first, first + count) of a matrix: a function of seed, name and place alone."""
    end = first + count
    for chunk in range(first // _CHUNK, -(-end // _CHUNK)):
        begin = chunk * _CHUNK
        low, high = max(first, begin), min(end, begin + _CHUNK)
        place = int.from_bytes(_digest(seed, tensor, chunk), "little") % ((POOL - _CHUNK) // _ALIGNED) * _ALIGNED
        yield Stretch(spread, place + low - begin, high - low)


@cache
def pool(spread: float) -> npt.NDArray[np.uint16]:
    """Bits of POOL bfloat16 values of N(0, spread²), by inversion: 65,536 equally likely ones."""
    values = (_quantiles() * np.float32(spread)).astype(numpy_dtype(DType.BF16)).view(np.uint16)[_ranks()]
    values.flags.writeable = False
    return values


@cache
def _quantiles() -> npt.NDArray[np.float32]:
    from statistics import NormalDist  # with its fractions and decimals it is slow to load, and a checkpoint needs none

    normal = NormalDist()
    return np.array([normal.inv_cdf((index + 0.5) / 65536) for index in range(65536)], np.float32)


@cache
def _ranks() -> npt.NDArray[np.uint16]:
    return np.random.default_rng(0).integers(0, 65536, POOL, np.uint16)


def _digest(seed: int, name: str, part: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}\0{part}".encode()).digest()[:8]
