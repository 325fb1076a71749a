"""Kernel parameters and launch geometry, as values that manifest, build, backend and trace share."""

from typing import Literal

from msgspec import Struct

ParamKind = Literal["ptr", "i32", "u32", "i64", "f32", "map"]


class Param(Struct, frozen=True):
    """One declared parameter of a kernel entry: ``ptr<const float> x``, ``i32 hidden``, ``f32 eps``, ``map weight``.

    ``element`` is what a ptr points to, in the language of the kernels; empty for an untyped ptr and for scalars.
    """

    kind: ParamKind
    name: str
    element: str = ""

    @property
    def type(self) -> str:
        """The type as declared: ``ptr<const float>``, ``i32``."""
        return f"{self.kind}<{self.element}>" if self.element else self.kind

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


class TensorMap(Struct, frozen=True):
    """An array in device memory, without gaps, of which a copy engine brings one box at a time into shared memory.

    ``shape`` and ``box`` are outermost first. ``address`` is a multiple of 16, as are the bytes of a row of elements of ``itemsize`` bytes;
    a box has rows of 128 bytes, swizzled by 16-byte pieces, and what of it lies outside the array becomes zeros. (CUDA:
    cuTensorMapEncodeTiled.)
    """

    address: int
    shape: tuple[int, ...]
    box: tuple[int, ...]
    itemsize: int


class Arg(Struct, frozen=True):
    """One value for one parameter. A ``ptr`` is a device address; a ``map`` has that of its ``matrix``, for devices with copy engines."""

    kind: ParamKind
    value: int | float
    matrix: TensorMap | None = None


def ptr(address: int) -> Arg:
    """A device address."""
    return Arg("ptr", address)


def i32(value: int) -> Arg:
    """A 32-bit signed integer."""
    return Arg("i32", value)


def u32(value: int) -> Arg:
    """A 32-bit unsigned integer."""
    return Arg("u32", value)


def i64(value: int) -> Arg:
    """A 64-bit signed integer."""
    return Arg("i64", value)


def f32(value: float) -> Arg:
    """A 32-bit float."""
    return Arg("f32", value)


def tensor_map(matrix: TensorMap) -> Arg:
    """A matrix for the copy engine."""
    return Arg("map", matrix.address, matrix)


class Geometry(Struct, frozen=True):
    """How a kernel is spread out.

    GPU: ``grid`` blocks of ``block`` threads with ``shared`` bytes of dynamic shared memory. CPU: ``grid[0]`` is the
    number of tasks, 0 for as many as the pool has threads; the rest is unused.
    """

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0


class LaunchAttrs(Struct, frozen=True):
    """``overlap`` lets a kernel start before its predecessor ends (programmatic dependent launch on CUDA).

    ``cluster`` is the blocks that share memory; ``cooperative`` says that all blocks wait for each other.
    """

    overlap: bool = False
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
