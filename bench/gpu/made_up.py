# ruff: noqa: INP001 -- no package: beside the scripts that import it
"""Weights for a benchmark: of the sizes and spreads of a model that has just been initialised, made in a second.

Activations keep a deviation of about 1 all the way, so that a step is as well conditioned as one of a trained model, and two ways
of computing it can be compared: matrices keep the variance of their inputs, what a layer adds to the residual stream is RESIDUAL of
it, router logits have a deviation of ROUTER (flat routers hang on rounding: one expert taken for another changes a token's whole
way through the layers above it). Rates and biases of decays are those that Gated DeltaNet begins with (Yang et al., 2024; as in
Mamba 2, Dao and Gu, 2024): rates exp(a_log) uniform up to 16, steps softplus(dt_bias) from 0.001 to 0.1, by their logarithm.
"""

from collections.abc import Mapping
from math import log
from typing import Any

import ml_dtypes
import numpy as np

from atlas_core.contracts.ops import Buffer

POOL_BYTES = 64 << 20
RESIDUAL, ROUTER, HEAD = 0.5, 4.0, 1.5
"""Standard deviations: of what a layer adds to a stream of 1, about; of router logits; of logits."""
_INTO_RESIDUAL = (".o", ".down")
_MOST_RATE, _STEPS = 16.0, (0.001, 0.1)


def deviation(name: str, shape: tuple[int, ...]) -> float:
    """Of a matrix with this canonical name, [..., rows, summed] (convolutions: [channels, taps])."""
    if name == "embed":
        return 1.0
    factor = RESIDUAL if name.endswith(_INTO_RESIDUAL) else ROUTER if name.endswith(".router") else 1.0
    return float((HEAD if name == "head" else factor) * shape[-1] ** -0.5)


def vector(name: str, size: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """float32 [size]: decays as above, norms near 1, biases near 0."""
    if name.endswith("a_log"):
        return np.log(rng.uniform(1e-2, _MOST_RATE, size)).astype(np.float32)
    if name.endswith("dt_bias"):
        step = np.exp(rng.uniform(log(_STEPS[0]), log(_STEPS[1]), size))
        return (step + np.log(-np.expm1(-step))).astype(np.float32)  # softplus of which is the step
    return (float(name.endswith("norm")) + rng.standard_normal(size) * 0.1).astype(np.float32)


def fill(backend: Any, weights: Mapping[tuple[str, str], Buffer], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fills bfloat16 ``weights``, by name and packing: stretches of one pool of normal values for each deviation."""
    stream, rng = backend.create_stream(), np.random.default_rng(1)
    normal = rng.standard_normal(POOL_BYTES // 2, np.float32)
    pool = backend.alloc(POOL_BYTES)
    matrices: dict[float, list[Buffer]] = {}
    for (name, _), buffer in weights.items():
        shape = shapes[name]
        if len(shape) == 1:
            values = vector(name, buffer.nbytes // 2, rng)
            backend.copy_h2d(values.astype(ml_dtypes.bfloat16).tobytes(), buffer.address)
        else:
            matrices.setdefault(deviation(name, shape), []).append(buffer)
    for spread, buffers in matrices.items():
        backend.copy_h2d((normal * np.float32(spread)).astype(ml_dtypes.bfloat16).tobytes(), pool)
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                start = int(rng.integers(POOL_BYTES // 512)) * 256
                part = min(POOL_BYTES - start, buffer.nbytes - done)
                backend.copy_d2d_async(pool + start, buffer.address + done, part, stream)
                done += part
        backend.synchronize(stream)
    backend.free(pool)
