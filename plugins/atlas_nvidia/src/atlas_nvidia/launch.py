"""A launch: arguments packed once into memory that the driver reads at every enqueue. Pure but for ctypes."""

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from msgspec import Struct

from atlas_core.kernels.library import CompiledKernel
from atlas_core.vocab.errors import KernelError, ResidencyError
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, Param, TensorMap

_TYPES: dict[str, Any] = {
    "ptr": ctypes.c_uint64, "i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "f32": ctypes.c_float,
}  # fmt: skip
_RANGES = {"ptr": (0, 2**64), "map": (0, 2**64), "i32": (-(2**31), 2**31), "u32": (0, 2**32), "i64": (-(2**63), 2**63)}


class PackedArguments:
    """The values, 8 bytes apart, and the array of their addresses that cuLaunchKernelEx takes (``address``).

    ``encode`` makes the driver's form of a TensorMap: its address, and what keeps it alive.
    """

    def __init__(self, args: Sequence[Arg], encode: Callable[[TensorMap], tuple[int, Any]]) -> None:
        self._values = (ctypes.c_uint64 * max(len(args), 1))()
        self._maps = []
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * max(len(args), 1))()
        for index, arg in enumerate(args):
            if arg.matrix is not None:
                self._pointers[index], kept = encode(arg.matrix)
                self._maps.append(kept)
                continue
            _TYPES[arg.kind].from_buffer(self._values, 8 * index).value = arg.value
            self._pointers[index] = base + 8 * index
        self.address = ctypes.addressof(self._pointers)


def check_arguments(kernel: str, params: Sequence[Param], args: Sequence[Arg]) -> None:
    """Raise KernelError naming the parameter whose argument is missing, of another kind or out of range."""
    if len(args) != len(params):
        names = ", ".join(param.name for param in params)
        raise KernelError(
            f"{kernel} takes {len(params)} arguments and got {len(args)}", f"its parameters are {names}", _FAULT
        )
    for param, arg in zip(params, args, strict=True):
        if arg.kind != param.kind:
            raise KernelError(f"{param.name} of {kernel} is {param.type}", f"the argument is {arg.kind}", _FAULT)
        if (arg.matrix is not None) != (arg.kind == "map"):
            raise KernelError(f"{param.name} of {kernel} is {param.type}", f"its matrix is {arg.matrix}", _FAULT)
        if arg.matrix is not None and (reason := _unfit(arg.matrix)):
            raise KernelError(f"{param.name} of {kernel} cannot be copied in boxes", reason, _FAULT)
        low, high = _RANGES.get(arg.kind, (None, None))
        if low is not None and high is not None and not low <= arg.value < high:
            raise KernelError(f"{param.name} of {kernel} is {param.type}", f"{arg.value} does not fit", _FAULT)


def _unfit(array: TensorMap) -> str:
    """Why the copy engine cannot take boxes of this array (CUDA driver API, cuTensorMapEncodeTiled); empty when it can."""
    row = array.shape[-1] * array.itemsize
    if array.itemsize not in MAP_ITEMS:
        return f"elements have {array.itemsize} bytes, not 1, 2 or 4"
    if array.address % 16 or row % 16:
        return f"at {array.address:#x}, rows of {row} bytes: both must be multiples of 16"
    if not 2 <= len(array.shape) == len(array.box) <= 5 or any(not 0 < n <= 256 for n in array.box):
        return f"a box of {array.box} out of {array.shape}: 2 to 5 dimensions, from 1 to 256 each"
    return "" if array.box[-1] * array.itemsize == BOX_BYTES else f"a row of a box has {BOX_BYTES} bytes"


MAP_ITEMS = (1, 2, 4)
"""Bytes of an element that boxes are made of."""
BOX_BYTES = 128
"""Of a row of a box: what the swizzle of 128 bytes spans."""


_FAULT = "this is a fault of the implementation that launches it"


class Limits(Struct, frozen=True):
    """What one launch may ask of this device: block edges and threads, grid edges, shared memory and cluster blocks."""

    threads: int
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared: int
    cluster: int


def check_geometry(
    kernel: str, geometry: Geometry, attrs: LaunchAttrs, limits: Limits, threads: int, static: int
) -> None:
    """Raise KernelError when the geometry exceeds the device, ``threads`` (what the kernel was compiled for) or its cluster.

    ``static`` is the shared memory that the kernel has by itself, in bytes.
    """
    block, grid = geometry.block, geometry.grid
    count = block[0] * block[1] * block[2]
    cluster = attrs.cluster or (1, 1, 1)
    problems = [
        (count > min(threads, limits.threads), f"{count} threads a block, at most {min(threads, limits.threads)}"),
        (
            any(b < 1 or b > most for b, most in zip(block, limits.block, strict=True)),
            f"block {block}, at most {limits.block}",
        ),
        (
            any(g < 1 or g > most for g, most in zip(grid, limits.grid, strict=True)),
            f"grid {grid}, from 1 to {limits.grid}",
        ),
        (
            geometry.shared + static > limits.shared,
            f"{geometry.shared + static} bytes of shared memory, at most {limits.shared}",
        ),
        (
            cluster[0] * cluster[1] * cluster[2] > limits.cluster,
            f"clusters of {cluster}, at most {limits.cluster} blocks",
        ),
        (
            any(g % c for g, c in zip(grid, cluster, strict=True)),
            f"grid {grid} is no multiple of the cluster {cluster}",
        ),
    ]
    for wrong, text in problems:
        if wrong:
            raise KernelError(f"{kernel} cannot be launched so", text, _FAULT)


def check_residency(kernel: str, geometry: Geometry, cluster: tuple[int, int, int], room: int) -> None:
    """Raise ResidencyError when the device has room for fewer clusters at once than the launch has, ``room``."""
    wanted = prod(geometry.grid) // prod(cluster)
    if wanted > room:
        raise ResidencyError(
            f"{kernel} has {wanted} clusters of {prod(cluster)} blocks that wait for each other",
            f"this device runs {room} at once", "use a kernel that does without them",
        )  # fmt: skip


class CudaKernel(Struct, frozen=True):
    """A loaded entry. ``function`` is the driver's handle, ``threads`` and ``static_shared`` what it was compiled for."""

    function: Any
    compiled: CompiledKernel
    threads: int
    static_shared: int

    @property
    def title(self) -> str:
        """``entry of module``."""
        return f"{self.compiled.entry} of {self.compiled.module}"


class CudaLaunch(Struct, frozen=True):
    """See contracts.backend.Launch. ``config`` is the driver's structure; only its stream changes from enqueue to enqueue."""

    kernel: CudaKernel
    geometry: Geometry
    args: tuple[Arg, ...]
    attrs: LaunchAttrs
    config: Any
    packed: PackedArguments

    @property
    def description(self) -> str:
        """Kernel, geometry and every argument by name."""
        g = self.geometry
        values = ", ".join(
            f"{param.name}={arg.value:#x}" if arg.kind in ("ptr", "map") else f"{param.name}={arg.value}"
            for param, arg in zip(self.kernel.compiled.params, self.args, strict=True)
        )
        cluster = f" cluster {self.attrs.cluster}" if self.attrs.cluster else ""
        return f"{self.kernel.title} grid {g.grid} block {g.block} shared {g.shared}{cluster} ({values})"
