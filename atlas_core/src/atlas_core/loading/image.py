"""A packed image: every copy of every weight as the device holds it, in one file with checksums.

    magic, lengths, checksum of the head | identity and entries (JSON) | a CRC-32 for each CHUNK of each entry | entries

Numbers are little-endian. Entries begin at whole blocks, so that they can be read past the page cache. The identity says what the bytes
follow from; who opens an image with another one is told which part differs.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from msgspec import Struct

from atlas_core.contracts.backend import GpuBackend
from atlas_core.contracts.checkpoint import Extent
from atlas_core.loading.extents import ALIGNMENT
from atlas_core.loading.files import RangeFile
from atlas_core.loading.pieces import Checks, Piece
from atlas_core.runtime.loader import WeightCopy, WeightKey, WeightMemory
from atlas_core.vocab.errors import CheckpointError

MAGIC, VERSION = b"ATLASIMG", 1
_PREFIX = struct.Struct("<8sIIQQ")  # magic, version, CRC-32 of head and sums, bytes of the head, bytes of the sums
CHUNK = 1 << 20
"""Bytes that one checksum covers."""
_THREADS = 8
"""That sum up and write."""
Progress = Callable[[int, int, str], None]
Identity = Mapping[str, str]


class UnusableImageError(CheckpointError):
    """An image cannot be used; the checkpoint can."""


class PackedImage(Struct, frozen=True):
    """An opened image: where each copy lies, and what its chunks sum up to."""

    path: Path
    places: Mapping[WeightKey, tuple[int, Sequence[int]]]

    def pieces(self, copy: WeightCopy, most: int) -> list[Piece]:
        """The copy in pieces of at most ``most`` bytes, or of one chunk where that is more."""
        start, sums = self.places[copy.weight, copy.packed.name]
        step = max(1, most // CHUNK)
        found = []
        for first in range(0, len(sums), step):
            offset = first * CHUNK
            nbytes = min(step * CHUNK, copy.packed.nbytes - offset)
            checks = Checks(CHUNK, tuple(sums[first : first + step]))
            found.append(Piece(copy, Extent(self.path, start + offset, nbytes), offset, nbytes, checks=checks))
        return found


def open_image(path: Path, copies: Sequence[WeightCopy], identity: Identity) -> PackedImage | None:
    """The image at ``path``; None when there is none.

    Raises UnusableImageError when it is of something else than ``identity`` and ``copies``, or not whole.
    """
    if not path.exists():
        return None
    file = RangeFile(path)
    try:
        return _opened(file, copies, identity)
    finally:
        file.close()


def _opened(file: RangeFile, copies: Sequence[WeightCopy], identity: Identity) -> PackedImage:
    if file.size < _PREFIX.size:
        raise _damaged(file.path, f"it has {file.size} bytes")
    magic, version, crc, length, sums_bytes = _PREFIX.unpack(file.read([(0, _PREFIX.size)]))
    if magic != MAGIC or version != VERSION:
        raise _damaged(file.path, f"it begins with {magic!r}, version {version}, not {MAGIC!r}, version {VERSION}")
    end = _PREFIX.size + length + sums_bytes
    if file.size < end:
        raise _damaged(file.path, f"it ends within its head, at byte {file.size}")
    body = file.read([(_PREFIX.size, end)])
    if zlib.crc32(body) != crc:
        raise _damaged(file.path, "the checksum of its head differs")
    head = json.loads(bytes(body[:length]))
    differing = sorted(k for k in {*identity, *head["identity"]} if identity.get(k) != head["identity"].get(k))
    layout = _Layout(copies, length)
    if differing or head["entries"] != layout.entries:
        parts = ", ".join(differing) or "weights"
        raise UnusableImageError(
            f"{file.path} was made for something else", f"what differs: {parts}", "it is made anew by itself"
        )
    if file.size != layout.nbytes:
        raise _damaged(file.path, f"it has {file.size} bytes instead of {layout.nbytes}")
    sums = struct.unpack(f"<{layout.chunks}I", body[length:])
    places: dict[WeightKey, tuple[int, Sequence[int]]] = {}
    first = 0
    for copy, start in zip(copies, layout.starts, strict=True):
        count = _chunks(copy)
        places[copy.weight, copy.packed.name] = start, sums[first : first + count]
        first += count
    return PackedImage(file.path, places)


def write_image(
    path: Path, backend: GpuBackend, memory: WeightMemory, copies: Sequence[WeightCopy], identity: Identity, progress: Progress
) -> None:  # fmt: skip
    """Write what the device holds; whoever opens ``path`` meanwhile finds the old image or none.

    It is left to the system when the disk has it: an image that a failing machine has torn is found by its checksums. Raises
    CheckpointError when the file cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb", buffering=0) as file:
            _write(file.fileno(), backend, memory, copies, identity, progress)
        scratch.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"the packed image {path} cannot be written",
            error.strerror or str(error),
            "make room, let the server write there, or leave --packed-cache out",
        ) from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def _write(
    file: int, backend: GpuBackend, memory: WeightMemory, copies: Sequence[WeightCopy], identity: Identity, progress: Progress
) -> None:  # fmt: skip
    head = json.dumps({"identity": dict(identity), "entries": _Layout(copies, 0).entries}).encode()
    layout = _Layout(copies, len(head))
    total, done = sum(copy.packed.nbytes for copy in copies), 0
    sums: list[int] = []

    def kept(part: memoryview, at: int) -> int:
        _put(file, part, at)
        return zlib.crc32(part)

    # The device fills one room while the other is summed up and written.
    most = _THREADS * CHUNK
    rooms = [backend.alloc_pinned(most) for _ in range(2)]
    written: list[list[Future[int]]] = [[], []]
    try:
        with ThreadPoolExecutor(_THREADS) as workers:
            turns = cycle(range(2))
            for copy, start in zip(copies, layout.starts, strict=True):
                address = memory.address(copy)
                for offset in range(0, copy.packed.nbytes, most):
                    turn = next(turns)
                    sums += [part.result() for part in written[turn]]
                    block = rooms[turn][: min(most, copy.packed.nbytes - offset)]
                    backend.copy_d2h(address + offset, block)
                    written[turn] = [
                        workers.submit(kept, block[at : at + CHUNK], start + offset + at)
                        for at in range(0, len(block), CHUNK)
                    ]
                done += copy.packed.nbytes
                progress(done, total, copy.weight)
            for turn in (next(turns), next(turns)):
                sums += [part.result() for part in written[turn]]
    finally:
        for room in rooms:
            backend.free_pinned(room)
    body = head + struct.pack(f"<{len(sums)}I", *sums)
    _put(file, _PREFIX.pack(MAGIC, VERSION, zlib.crc32(body), len(head), 4 * len(sums)) + body, 0)
    os.ftruncate(file, layout.nbytes)


def _put(file: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


class _Layout:
    """Where everything lies behind a head of ``length`` bytes."""

    def __init__(self, copies: Sequence[WeightCopy], length: int) -> None:
        self.entries = [[copy.weight, copy.packed.name, copy.packed.nbytes] for copy in copies]
        self.chunks = sum(map(_chunks, copies))
        self.starts: list[int] = []
        self.nbytes = _blocks(_PREFIX.size + length + 4 * self.chunks)
        for copy in copies:
            self.starts.append(self.nbytes)
            self.nbytes += _blocks(copy.packed.nbytes)


def _chunks(copy: WeightCopy) -> int:
    return -(-copy.packed.nbytes // CHUNK)


def _blocks(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _damaged(path: Path, why: str) -> UnusableImageError:
    return UnusableImageError(f"the packed image {path} is damaged", why, "it is made anew by itself")
