"""Weights that no kernel reads, decoded by their format and rounded to a plain type."""

import os
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np

from atlas_core.contracts.quant import QuantFormat
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout

_STRETCH = 1 << 20
"""Weights that are decoded at once: their float32 fit into a cache."""


def transcode(
    owner: QuantFormat, stored: StorageLayout, data: bytes | memoryview, shape: tuple[int, ...], scalar: DType
) -> memoryview:
    """The bytes of a weight of ``shape`` in ``scalar``, from ``data`` in the layout ``stored`` of ``owner``.

    On all processors, a stretch of rows each: the float32 of a whole weight, which may be a stack of experts, are never there at
    once. Raises CheckpointError when ``data`` is not of that size.
    """
    out = np.empty(shape, numpy_dtype(scalar))
    columns = shape[-1] if shape else 1
    rows, width, view = prod(shape[:-1]), stored.row_bytes(columns), memoryview(data).cast("B")
    step = max(1, _STRETCH // columns)
    if len(view) != rows * width or rows <= step:
        out[...] = owner.decode(stored.name, view, shape)  # which refuses another size
    else:
        table = out.reshape(rows, columns)

        def decode(first: int) -> None:
            last = min(first + step, rows)
            table[first:last] = owner.decode(stored.name, view[first * width : last * width], (last - first, columns))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(decode, range(0, rows, step)):
                pass
    return out.reshape(-1).view(np.uint8).data
