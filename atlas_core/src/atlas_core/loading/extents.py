"""Bytes of files into memory that the device copies from: from the page cache where they are there, else past it."""

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import Any

from atlas_core.contracts.checkpoint import Extent
from atlas_core.loading.files import unreadable
from atlas_core.vocab.errors import CheckpointError

ALIGNMENT = 4096
"""Of memory, position and length of direct reads: the largest logical block of common disks."""
MARGIN = 2 * ALIGNMENT
"""Bytes that a buffer must be longer than what is read into it: direct reads begin and end at whole blocks."""
_DIRECT_FROM = 256 * 1024
"""Bytes; shorter reads wait for the disk anyhow, and the page cache serves their neighbours."""
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class ExtentReader:
    """Opens each file once; threads may read at once. Nothing is memory-mapped.

    What is in the page cache is copied from there. What is not is read directly (O_DIRECT): a copy through the page cache costs
    a second pass over memory, and would push out what other programs keep there. A file system that cannot say what it has
    cached, or has no direct reads, is read in the ordinary way. ``direct_bytes`` counts what came past the cache.
    """

    def __init__(self) -> None:
        self.direct_bytes = 0
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()

    def read(self, extent: Extent, into: memoryview) -> int:
        """Read into ``into``, which is aligned and MARGIN longer than the extent; where in it the bytes begin.

        Raises CheckpointError when the file ends before, or cannot be read.
        """
        file = self._file(extent.path)
        try:
            if file.cached(extent, into):
                return 0
            if extent.nbytes >= _DIRECT_FROM:
                begin = file.direct(extent, into)
                if begin is not None:
                    with self._lock:
                        self.direct_bytes += extent.nbytes
                    return begin
            file.buffered(extent, into)
        except OSError as error:
            raise unreadable(extent.path, error) from error
        return 0

    def resident(self, extent: Extent) -> bool:
        """Whether it begins in the page cache; false where the file system does not tell. Raises CheckpointError."""
        try:
            return self._file(extent.path).resident(extent)
        except OSError as error:
            raise unreadable(extent.path, error) from error

    def descriptor(self, path: Path) -> int:
        """An open file, of which the kernel reads nothing ahead; closed with this. Raises CheckpointError."""
        return self._file(path).alone

    def close(self) -> None:
        """Close every file; nobody reads any more. Safe to call twice."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, path: Path) -> "_File":
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = _File(path)
            return file


class _File:
    """One file, with a second descriptor for direct reads once they are wanted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.alone = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.alone, 0, 0, os.POSIX_FADV_RANDOM)
        self._direct: int | None = None
        self._lock = threading.Lock()
        self._tells = hasattr(os, "RWF_NOWAIT")
        self._skips = hasattr(os, "O_DIRECT")

    def resident(self, extent: Extent) -> bool:
        """Whether its first byte is in the page cache.

        It is asked for by itself, without read-ahead: a read that may not wait still has the kernel fetch what follows, which a
        direct read would then fetch again.
        """
        return self._nowait(self.alone, memoryview(bytearray(1)), extent.start) == 1

    def cached(self, extent: Extent, into: memoryview) -> bool:
        """Whether all of it was in the page cache, and now is in ``into``."""
        return (
            self.resident(extent)
            and self._nowait(self._descriptor, into[: extent.nbytes], extent.start) == extent.nbytes
        )

    def _nowait(self, descriptor: int, into: memoryview, start: int) -> int:
        """Bytes that were there without waiting."""
        if not self._tells:
            return 0
        try:
            return os.preadv(descriptor, [into], start, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._tells = self._skips = False  # a file system in memory, most likely
            return 0

    def direct(self, extent: Extent, into: memoryview) -> int | None:
        """Past the page cache, in whole blocks; None when this file system does not do that."""
        descriptor = self._direct_descriptor()
        if descriptor is None:
            return None
        first = extent.start // ALIGNMENT * ALIGNMENT
        begin = extent.start - first
        whole = -(-(begin + extent.nbytes) // ALIGNMENT) * ALIGNMENT
        filled = 0
        while filled < begin + extent.nbytes:
            try:
                got = os.preadv(descriptor, [into[filled:whole]], first + filled)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._skips = False
                return None
            filled += got
            if got == 0 or (got % ALIGNMENT and filled < begin + extent.nbytes):
                self._ended(first + filled, extent)
        return begin

    def buffered(self, extent: Extent, into: memoryview) -> None:
        """In the ordinary way."""
        filled = 0
        while filled < extent.nbytes:
            got = os.preadv(self._descriptor, [into[filled : extent.nbytes]], extent.start + filled)
            if got == 0:
                self._ended(extent.start + filled, extent)
            filled += got

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self.alone)
        if self._direct is not None:
            os.close(self._direct)

    def _direct_descriptor(self) -> int | None:
        with self._lock:
            if self._skips and self._direct is None:
                self._skips = False
                with contextlib.suppress(OSError):  # a file system without direct reads refuses to open so
                    self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                    self._skips = True
            return self._direct if self._skips else None

    def _ended(self, position: int, extent: Extent) -> Any:
        raise CheckpointError(
            f"{self.path} ended at byte {position} while bytes up to {extent.start + extent.nbytes} were read",
            "something has changed it since it was opened",
            "let the download finish, then start again",
        )
