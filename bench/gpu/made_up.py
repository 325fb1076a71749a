"""Weights for a benchmark, as ``--load-format dummy`` makes them up (see atlas_core.loading.drawn), by their canonical names."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes

from atlas_core.contracts.ops import Buffer
from atlas_core.loading.drawing import draw
from atlas_core.loading.drawn import deviation, stretches, vector

SEED = 1


def fill(backend: Any, weights: Mapping[tuple[str, str], Buffer], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fills bfloat16 ``weights``, by name and packing."""
    matrices = []
    for (name, _), buffer in weights.items():
        shape = shapes[name]
        if len(shape) == 1:
            values = vector(SEED, name, buffer.nbytes // 2).astype(ml_dtypes.bfloat16)
            backend.copy_h2d(values.tobytes(), buffer.address)
        else:
            matrices.append((buffer.address, [*stretches(SEED, name, deviation(name, shape), 0, buffer.nbytes // 2)]))
    draw(backend, matrices)
