"""Which distributions offer plugins, read from their dist-info folders.

``importlib.metadata`` reads the same, and loads a parser of mails to do so: with it a start takes a twentieth of a second longer.
It is asked where a place on the path is no folder (an archive), which it can look into.
"""

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

_VALUE = re.compile(r"(?P<module>[\w.]+)\s*(:\s*(?P<attribute>[\w.]+))?\s*(\[.*\])?")
_SUFFIXES = {".dist-info": "METADATA", ".egg-info": "PKG-INFO"}
"""Folders that installers write, and the file in them that has the distribution's name."""


class Point(Struct, frozen=True):
    """One entry point. ``dist`` is empty and ``version`` None where the distribution does not tell them."""

    group: str
    key: str
    value: str
    dist: str
    version: str | None

    @property
    def module(self) -> str:
        """The module that it is in."""
        found = _VALUE.fullmatch(self.value)
        return found["module"] if found else self.value

    def load(self) -> Any:
        """The object. Raises whatever importing the module raises, AttributeError, or ValueError for a value that names no object."""
        found = _VALUE.fullmatch(self.value)
        if found is None:
            raise ValueError(f"{self.value!r} is not of the form module:attribute")
        loaded: Any = importlib.import_module(found["module"])
        for name in filter(None, (found["attribute"] or "").split(".")):
            loaded = getattr(loaded, name)
        return loaded


def points(groups: Collection[str]) -> list[Point]:
    """Every entry point of these groups. Of distributions with one name the first on the path counts, as for imports."""
    places = [Path(place or ".") for place in sys.path]
    if any(place.is_file() for place in places):
        return list(_by_the_library(groups))
    found: list[Point] = []
    seen: set[str] = set()
    for place in dict.fromkeys(places):
        for folder in _folders(place):
            name = re.sub(r"[-_.]+", "-", folder.rpartition("/")[2].partition("-")[0].removesuffix(".egg")).lower()
            if name not in seen:
                seen.add(name)
                found += _points_of(folder, groups)
    return found


def _folders(place: Path) -> list[str]:
    try:
        with os.scandir(place) as entries:
            return sorted(entry.path for entry in entries if entry.name.endswith(tuple(_SUFFIXES)))
    except OSError:
        return []  # what is no folder, or may not be looked into, has no modules either


def _points_of(folder: str, groups: Collection[str]) -> Iterator[Point]:
    text = _read(f"{folder}/entry_points.txt")
    if not any(f"[{group}]" in text for group in groups):
        return
    metadata = _read(f"{folder}/{next(name for suffix, name in _SUFFIXES.items() if folder.endswith(suffix))}")
    dist, version = _header(metadata, "Name"), _header(metadata, "Version")
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1]
        elif line and not line.startswith("#") and group in groups:
            key, _, value = line.partition("=")
            yield Point(group, key.strip(), value.strip(), dist or "", version if dist else None)


def _header(metadata: str, name: str) -> str | None:
    head = metadata.partition("\n\n")[0]
    found = re.search(rf"^{name}:[ \t]*(\S.*?)\s*$", head, re.MULTILINE | re.IGNORECASE)
    return found[1] if found else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123  most folders have no such file, and a Path takes longer to say so
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""  # the record of a plugin says so where it matters


def _by_the_library(groups: Collection[str]) -> Iterator[Point]:
    from importlib.metadata import entry_points

    every = entry_points()
    for group in groups:
        for point in every.select(group=group):
            dist, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
            yield Point(group, point.name, point.value, dist or "", version if dist and version else None)
