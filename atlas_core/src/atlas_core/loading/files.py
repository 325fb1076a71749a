"""Whole reads of byte ranges, and a guess at what a file that is not what it should be is."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from atlas_core.vocab.errors import CheckpointError

AGAIN = "download it again; `git lfs pull` if it was cloned with git"


class RangeFile:
    """Positional reads of one file. Threads may read at once; nothing is memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the file cannot be opened."""
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise unreadable(path, error) from error
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, ranges: Sequence[tuple[int, int]]) -> memoryview:
        """The bytes of the ranges [start, end), one after another. Raises CheckpointError when the file ends before."""
        descriptor = self._file.fileno()
        view = memoryview(bytearray(sum(end - start for start, end in ranges)))
        filled = 0
        for first, end in ranges:
            start = first
            while start < end:
                try:
                    got = os.preadv(descriptor, [view[filled : filled + end - start]], start)
                except OSError as error:
                    raise unreadable(self.path, error) from error
                if got == 0:
                    raise CheckpointError(
                        f"{self.path} ended at byte {start} while bytes up to {end} were read",
                        f"it had {self.size} bytes when it was opened: something has changed it",
                        "let the download finish, then start again",
                    )
                start += got
                filled += got
        return view

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that the system does not give."""
    return CheckpointError(
        f"{path} cannot be read", error.strerror or str(error), "check that it exists and who may read it"
    )


def head(path: Path) -> bytes:
    """The first bytes of a file, enough for ``impostor``. Raises CheckpointError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise unreadable(path, error) from error


def impostor(head: bytes) -> str:
    """What the first bytes of a file look like when they are not a model's: a git-lfs pointer, a web page, none at all; else nothing."""
    if not head:
        return "it is empty"
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
        wanted = f" for a file of {int(size.group(1))} bytes" if size else ""
        return f"it looks like a git-lfs pointer{wanted}, not like the file itself"
    if head.lstrip()[:15].lower().startswith((b"<!doctype", b"<html")):
        return "it looks like a web page (an error page saved as the file?)"
    return ""
