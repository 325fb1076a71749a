"""Files of this user's that no other user can have written, whole or not there."""

import hashlib
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

_MAGIC = b"atlas kept 1\n"
_DIGEST = hashlib.sha256().digest_size
_MOST_BYTES = 256 << 20
_MOST_FILES = 64
"""Older ones are removed when another is written: each model with each set of settings has one."""


def read(path: Path) -> bytes | None:
    """What was written; None where there is nothing, or where it is not what this user wrote."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not _ours(os.fstat(descriptor)):
            return None
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            data = file.readall()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    content = memoryview(data)[len(_MAGIC) + _DIGEST :]
    return bytes(content) if data.startswith(_MAGIC + hashlib.sha256(content).digest()) else None


def _ours(facts: os.stat_result) -> bool:
    others = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not others and facts.st_size <= _MOST_BYTES


def write(path: Path, content: bytes) -> None:
    """All of it or nothing. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    part.unlink(missing_ok=True)  # of a process that had this number before
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(content).digest() + content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _tidy(path.parent, path.suffix)


def _tidy(folder: Path, suffix: str) -> None:
    with suppress(OSError):  # somebody else tidies as well
        found = sorted(folder.glob(f"*{suffix}"), key=lambda each: each.stat().st_mtime_ns)
        for old in found[:-_MOST_FILES]:
            old.unlink(missing_ok=True)
