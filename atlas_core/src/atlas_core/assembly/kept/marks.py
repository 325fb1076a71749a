"""What a start depends on, as marks that change when it does: what is installed, the processor, the files of the model.

Files are known by name, size, time of change and inode, as Python trusts its byte code: reading them all takes longer than planning.
What is written by somebody with another file's size and time, in its place, is not noticed. Drivers and devices are not here: a
plugin's probe and its word on architectures are asked for at every start.
"""

import hashlib
import os
import platform
import sys
from array import array
from collections.abc import Collection, Iterable
from operator import attrgetter
from pathlib import Path

from msgspec import Struct

_PROCESSOR = (
    "vendor_id",
    "model name",
    "flags",
    "Features",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
)
_DISTRIBUTIONS = (".dist-info", ".egg-info")
_MARKED_IN_BINARIES = ".json"
"""Of compiled kernels the manifest has the digests; the others are there or not."""


_TICK_NS = 1_000_000_000
"""Clocks of file systems lag behind by some milliseconds."""


class Mark(Struct, frozen=True):
    """``digest`` of what was looked at, and when the last of it was changed, in nanoseconds."""

    digest: str
    newest: int

    def older(self, moment: int) -> bool:
        """Whether all of it surely was as it is at ``moment``, in nanoseconds of the clock."""
        return self.newest < moment - _TICK_NS


class Marking:
    """Collects what there is to know of files: ``names``, and of most of them ``facts``."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.facts: list[os.stat_result] = []

    def add(self, name: str, facts: os.stat_result) -> None:
        """A file."""
        self.names.append(name)
        self.facts.append(facts)

    def below(self, folder: str, *, binaries: bool = False) -> None:
        """All files of a folder and those in it; of binaries only those that tell of the others. Raises OSError."""
        with os.scandir(folder) as entries:
            found = sorted((entry for entry in entries if entry.name != "__pycache__"), key=_name)
        self.names.append(folder)
        self.names += [entry.name for entry in found]
        files = []
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                self.below(entry.path, binaries=binaries or entry.name == "_compiled")
            elif not binaries or entry.name.endswith(_MARKED_IN_BINARIES):
                files.append(entry)
        self.facts += [entry.stat() for entry in files]

    def done(self) -> Mark:
        """The mark of all."""
        text = "\0".join(self.names).encode("utf-8", "surrogateescape")
        times = [each.st_mtime_ns for each in self.facts]
        numbers = array("Q", times)
        for each in self.facts:
            numbers.extend((each.st_size, each.st_ino, each.st_dev))
        return Mark(hashlib.sha256(text + b"\0\0" + numbers.tobytes()).hexdigest(), max(times, default=0))


_name = attrgetter("name")


def installed(packages: Iterable[str], environ: Iterable[tuple[str, str]]) -> Mark:
    """Of this Python, where it looks for distributions and modules, the folders (or files) of these packages, and variables of the environment.

    Raises OSError when one of them cannot be read.
    """
    marking = Marking(f"{sys.version} {sys.implementation.cache_tag} {sorted(environ)}")
    folders = list(packages)
    names = {folder.rpartition("/")[2].partition(".")[0] for folder in folders}
    for place in sys.path:
        _place(marking, place, names)
    for folder in folders:
        path = Path(folder)
        if path.is_dir():
            marking.below(folder)
        else:
            marking.add(folder, path.stat())
    return marking.done()


def model(path: Path) -> Mark:
    """Of a file, or of all that is in a directory. Raises OSError."""
    marking = Marking(str(path.absolute()))
    if path.is_dir():
        marking.below(str(path))
    else:
        marking.add("", path.stat())
    return marking.done()


def processor() -> str:
    """What this machine's first processor is and can do; what of it can be known where there is no /proc/cpuinfo."""
    lines = [platform.machine(), platform.system()]
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    break  # the next processor
                if line.partition(":")[0].strip() in _PROCESSOR:
                    lines.append(line)
    except OSError:
        lines.append(platform.processor())
    return "\n".join(lines)


def _place(marking: Marking, place: str, packages: Collection[str]) -> None:
    """A place of the path: its distributions, and what may be imported from it in place of one of ``packages``."""
    marking.names.append(place)
    try:
        with os.scandir(place or ".") as entries:
            found = sorted((entry for entry in entries if _tells(entry.name, packages)), key=_name)
            for entry in found:
                if entry.name.endswith(_DISTRIBUTIONS):
                    marking.add(entry.name, entry.stat())
                else:
                    marking.names.append(entry.name)
    except NotADirectoryError:
        marking.add("", Path(place).stat())
    except FileNotFoundError:
        marking.names.append("is not there")


def _tells(name: str, packages: Collection[str]) -> bool:
    return name.endswith(_DISTRIBUTIONS) or name.partition(".")[0] in packages
