"""Weights cut into pieces that are read and brought to the device one by one. Pure."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from atlas_core.contracts.checkpoint import Extent
from atlas_core.contracts.ops import Repack
from atlas_core.loading.drawn import Stretch
from atlas_core.runtime.loader import STORED, WeightCopy
from atlas_core.vocab.errors import CheckpointError

_GAP = 64 * 1024
"""Bytes between two pieces that are rather read for nothing than left out."""


class Placed(Struct, frozen=True):
    """Where a weight's bytes lie: extents one behind another. ``order`` lists stored rows in the order of the model; None: as stored."""

    extents: tuple[Extent, ...]
    order: Sequence[int] | None = None


class WeightSource(Protocol):
    """Where weights come from."""

    def read(self, weight: str) -> bytes | memoryview:
        """All bytes of a weight, in the layout that the plan knows. Raises CheckpointError."""
        ...

    def placed(self, weight: str) -> Placed | None:
        """Where ``read`` would find them, when they are in files as they are."""
        ...

    def drawn(self, weight: str) -> Sequence[Stretch] | None:
        """How ``read`` would make them up, when it would."""
        ...


class Checks(Struct, frozen=True):
    """A CRC-32 for each ``chunk`` bytes of a piece, the last of which may be shorter."""

    chunk: int
    sums: tuple[int, ...]

    def verify(self, data: memoryview, extent: Extent) -> None:
        """Raises CheckpointError naming the bytes of the file that are others than were written."""
        for index, sum_ in enumerate(self.sums):
            start = index * self.chunk
            if zlib.crc32(data[start : start + self.chunk]) != sum_:
                first, last = extent.start + start, extent.start + min(start + self.chunk, extent.nbytes) - 1
                raise CheckpointError(
                    f"{extent.path} is damaged", f"the checksum of bytes {first} to {last} differs", "delete it"
                )


class Piece(Struct, frozen=True):
    """``extent`` becomes ``nbytes`` bytes at ``offset`` of the copy: as it is, or by ``repack`` of ``rows`` rows.

    ``order`` numbers the rows of the piece within the extent, int32. ``checks`` hold for the bytes of the extent.
    """

    copy: WeightCopy
    extent: Extent
    offset: int
    nbytes: int
    rows: int = 0
    repack: Repack | None = None
    order: npt.NDArray[np.int32] | None = None
    checks: Checks | None = None


class Load(Struct, frozen=True):
    """One read, and the pieces whose extents lie in it."""

    extent: Extent
    pieces: tuple[Piece, ...]

    @property
    def order_bytes(self) -> int:
        """Bytes of all orders of its pieces."""
        return sum(piece.order.nbytes for piece in self.pieces if piece.order is not None)


def loads(cut: Iterable[Piece], most: int) -> list[Load]:
    """The pieces in the order of the files; neighbours are read at once, up to ``most`` bytes."""
    found: list[Load] = []
    group: list[Piece] = []
    start = end = 0
    for piece in sorted(cut, key=lambda piece: (str(piece.extent.path), piece.extent.start)):
        extent = piece.extent
        if group and not (
            extent.path == group[0].extent.path
            and extent.start - end <= _GAP
            and max(end, extent.start + extent.nbytes) - start <= most
        ):
            found.append(Load(Extent(group[0].extent.path, start, end - start), tuple(group)))
            group = []
        if not group:
            start = end = extent.start
        group.append(piece)
        end = max(end, extent.start + extent.nbytes)
    if group:
        found.append(Load(Extent(group[0].extent.path, start, end - start), tuple(group)))
    return found


def pieces(copy: WeightCopy, placed: Placed, most: int, *, repacks: bool) -> list[Piece] | None:
    """Pieces of at most ``most`` stored bytes; None when the weight has to be read and packed whole.

    ``repacks``: the device reads host memory, so that it can pack.
    """
    if sum(extent.nbytes for extent in placed.extents) != _stored_bytes(copy) and placed.order is None:
        return None  # read and refused there, with the sizes
    if copy.packed.name.startswith(STORED):
        return None if placed.order is not None else list(_as_stored(copy, placed, most))
    made = _repack(copy) if repacks else None
    return None if made is None else _repacked(copy, placed, most, made)


def _stored_bytes(copy: WeightCopy) -> int:
    return copy.spec.layout.nbytes(copy.spec.shape) if copy.spec.layout else -1


def _repack(copy: WeightCopy) -> Repack | None:
    # Not isinstance: for a protocol that takes longer than all the rest of a small weight.
    repack: Callable[..., Repack | None] | None = getattr(copy.implementation, "repack", None)
    if repack is None or copy.spec.layout is None:
        return None
    return repack(copy.packed.name, copy.spec.layout, copy.spec.shape)


def _as_stored(copy: WeightCopy, placed: Placed, most: int) -> Iterator[Piece]:
    offset = 0
    for extent in placed.extents:
        for start in range(0, extent.nbytes, most):
            nbytes = min(most, extent.nbytes - start)
            yield Piece(copy, Extent(extent.path, extent.start + start, nbytes), offset, nbytes)
            offset += nbytes


def _repacked(copy: WeightCopy, placed: Placed, most: int, repack: Repack) -> list[Piece] | None:
    assert copy.spec.layout is not None
    width = copy.spec.layout.row_bytes(copy.spec.shape[-1])
    total = prod(copy.spec.shape[:-1])
    longest = most // width // repack.rows * repack.rows
    if not longest:
        return None
    if placed.order is not None:
        return _ordered(copy, placed, longest, width, repack)
    found: list[Piece] = []
    done = 0
    for extent in placed.extents:
        rows = extent.nbytes // width
        if done % repack.rows or extent.nbytes % width:
            return None  # a group of rows straddles two files
        for first in range(0, rows, longest):
            count = min(longest, rows - first)
            part = Extent(extent.path, extent.start + first * width, count * width)
            found.append(_piece(copy, part, done + first, count, repack))
        done += rows
    return found if done == total else None


def _ordered(copy: WeightCopy, placed: Placed, longest: int, width: int, repack: Repack) -> list[Piece] | None:
    """A piece reads the stored rows from its first to its last, which reorderings within heads keep close together."""
    if len(placed.extents) != 1 or placed.order is None:
        return None
    extent, order = placed.extents[0], np.asarray(placed.order, np.int32)
    if len(order) != prod(copy.spec.shape[:-1]) or (order.max() + 1) * width > extent.nbytes:
        return None
    found: list[Piece] = []
    first = 0
    while first < len(order):
        count = min(longest, len(order) - first)
        while True:
            rows = order[first : first + count]
            low, high = int(rows.min()), int(rows.max()) + 1
            if high - low <= longest:
                break
            count = count // 2 // repack.rows * repack.rows
            if not count:
                return None
        part = Extent(extent.path, extent.start + low * width, (high - low) * width)
        found.append(_piece(copy, part, first, count, repack, np.ascontiguousarray(rows - low)))
        first += count
    return found


def _piece(
    copy: WeightCopy, extent: Extent, first: int, rows: int, repack: Repack, order: npt.NDArray[np.int32] | None = None
) -> Piece:
    groups = -(-rows // repack.rows)
    return Piece(copy, extent, first // repack.rows * repack.nbytes, groups * repack.nbytes, rows, repack, order)
