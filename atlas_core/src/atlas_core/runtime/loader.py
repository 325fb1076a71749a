"""Which packed copies of weights a plan needs, and what their bytes are."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct, field

from atlas_core.contracts.backend import GpuBackend
from atlas_core.contracts.ops import Buffer, OperandSpec, OpImplementation, Packed
from atlas_core.runtime.plan import PlanSegment
from atlas_core.vocab.errors import CheckpointError, KernelError

STORED = "stored:"
"""Packings whose name begins so are the checkpoint's own bytes."""

Progress = Callable[[int, int, str], None]
WeightKey = tuple[str, str]
"""(canonical name of the weight, name of the packing)."""


class WeightCopy(Struct, frozen=True):
    """One packed copy of one weight that the device must hold."""

    weight: str
    packed: Packed
    spec: OperandSpec
    implementation: OpImplementation


class WeightMemory(Struct):
    """Device memory of every packed copy; whoever holds it frees it."""

    backend: GpuBackend
    buffers: dict[WeightKey, Buffer] = field(default_factory=dict)

    def address(self, copy: WeightCopy) -> int:
        """Where a copy lies."""
        return self.buffers[copy.weight, copy.packed.name].address

    def free(self) -> None:
        """Give the memory back; nothing queued may use it any more."""
        for buffer in self.buffers.values():
            self.backend.free(buffer.address)
        self.buffers.clear()


def weight_copies(segments: Iterable[PlanSegment]) -> tuple[WeightCopy, ...]:
    """Every copy that the planned segments of all buckets need, in order of first use.

    Raises KernelError when two steps want one packing with different sizes.
    """
    copies: dict[WeightKey, WeightCopy] = {}
    for segment in segments:
        for step in segment.steps:
            for operand, packed in step.packings.items():
                weight = step.node.operands[operand].name
                known = copies.setdefault(
                    (weight, packed.name),
                    WeightCopy(weight, packed, step.need.operands[operand], step.implementation),
                )
                if known.packed != packed:
                    raise KernelError(
                        f"{weight} packed as {packed.name} is {known.packed.nbytes} and {packed.nbytes} bytes",
                        f"{known.implementation.name} and {step.implementation.name} differ about one packing",
                        "equal names of packings must mean equal bytes",
                    )
    return tuple(copies.values())


def pack_weight(
    implementation: OpImplementation, packed: Packed, spec: OperandSpec, weight: str, data: bytes | memoryview
) -> bytes | memoryview:
    """The bytes that the device gets for ``weight`` stored as ``data``.

    Raises CheckpointError when ``data`` is not of the layout's size, KernelError when the packing is not of its own size.
    """
    if spec.layout is None:
        raise KernelError(
            f"{weight} has no storage layout", "it is used as a weight", "a plugin must record it as a weight"
        )
    expected = spec.layout.nbytes(spec.shape)
    if memoryview(data).nbytes != expected:
        raise CheckpointError(
            f"{weight} has {memoryview(data).nbytes} bytes",
            f"{list(spec.shape)} stored as {spec.layout.name} takes {expected}",
            "use an intact checkpoint",
        )
    if packed.name.startswith(STORED):
        result: bytes | memoryview = data
    else:
        result = as_bytes(implementation.pack(packed.name, spec.layout, spec.shape, data))
    if memoryview(result).nbytes != packed.nbytes:
        raise KernelError(
            f"{weight} packed as {packed.name} has {memoryview(result).nbytes} bytes",
            f"{implementation.name} announced {packed.nbytes}",
            "this is a fault of the hardware plugin",
        )
    return result


def as_bytes(data: bytes | memoryview | np.ndarray[Any, Any]) -> bytes | memoryview:
    """Any of these as flat bytes, without a copy where the array is contiguous."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    return data


def load_arrays(backend: GpuBackend, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Buffer]:
    """Constants to the device, as they are; freed again when one does not fit."""
    buffers: dict[str, Buffer] = {}
    try:
        for name, array in arrays.items():
            buffers[name] = Buffer(backend.alloc(array.nbytes), array.nbytes)
            backend.copy_h2d(as_bytes(array), buffers[name].address)
    except BaseException:
        for buffer in buffers.values():
            backend.free(buffer.address)
        raise
    return buffers
