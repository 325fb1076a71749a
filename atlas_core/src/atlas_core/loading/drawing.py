"""Drawn weights on the device: copies of stretches of pools that were brought there once."""

import contextlib
from collections.abc import Iterable, Sequence

import numpy as np

from atlas_core.contracts.backend import GpuBackend
from atlas_core.loading.drawn import Stretch, pool
from atlas_core.vocab.errors import AtlasError

_BYTES = 2  # a bfloat16


def draw(backend: GpuBackend, weights: Iterable[tuple[int, Sequence[Stretch]]]) -> None:
    """Fill each weight, at its address, with its stretches one behind another. Pools are given back once all is there."""
    stream = backend.create_stream()
    pools: dict[float, int] = {}
    try:
        for address, stretches in weights:
            filled = 0
            for stretch in stretches:
                if stretch.deviation not in pools:
                    values = pool(stretch.deviation)
                    pools[stretch.deviation] = backend.alloc(values.nbytes)
                    backend.copy_h2d(values.view(np.uint8).data, pools[stretch.deviation])
                source, nbytes = pools[stretch.deviation] + _BYTES * stretch.start, _BYTES * stretch.count
                backend.copy_d2d_async(source, address + filled, nbytes, stream)
                filled += nbytes
        backend.synchronize(stream)
    finally:
        with contextlib.suppress(AtlasError):  # after a fault this fails too: the first error counts
            backend.synchronize(stream)
            for address in pools.values():
                backend.free(address)
