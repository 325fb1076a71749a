"""Which bytes of a start's files are wanted first: a guess from settings alone, and what a model's headers tell. Imports little."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from atlas_core.contracts.checkpoint import Extent
from atlas_core.loading.ahead import ReadAhead
from atlas_core.settings import Settings

if TYPE_CHECKING:  # which takes as long as reading a gigabyte
    from atlas_core.assembly.model import Model

_LARGE = 64 << 20
"""Bytes of a file that most likely has weights."""


def guess(settings: Settings) -> ReadAhead | None:
    """Reads the image that will most likely be used, else the large files of the model; None where that would be of no use."""
    if settings.model is None or settings.load_format != "auto" or settings.transcode != "none":
        return None
    path = Path(settings.model)
    with suppress(OSError):  # whoever opens the model says what is wrong
        found = _images(settings, path)
        files = large_files(path) if found is None else found
        return ReadAhead([Extent(file, 0, file.stat().st_size) for file in files]) if files else None
    return None


def begin_reading(model: "Model", settings: Settings, guessed: ReadAhead | None = None) -> ReadAhead:
    """Reads what is wanted: goes on with what was ``guessed``, unless that lacks a file.

    Where all that can be guessed lies in the page cache, nothing need be found out: a mixture has 30,000 tensors.
    """
    guessed = guessed or guess(replace(settings, model=str(model.path)))
    if guessed is not None and not guessed.reads:
        return guessed
    wanted = list(_wanted(model, settings))
    if guessed is not None:
        if all(map(guessed.covers, {extent.path for extent in wanted})):
            guessed.restrict(wanted)
            return guessed
        guessed.close()
    return ReadAhead(wanted)


def image_stem(model: Path) -> str:
    """How the names of all images of the model at a path begin."""
    place = model.resolve()
    name = re.sub(r"[^\w.-]+", "-", place.name) or "model"
    return f"{name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"


def _images(settings: Settings, model: Path) -> list[Path] | None:
    """The one image there is, for whatever target and packing; none of several, and None where the checkpoint is read."""
    if settings.packed_cache is None:
        return None
    found = sorted(Path(settings.packed_cache).expanduser().glob(f"{image_stem(model)}-????????.packed"))
    return None if not found else found if len(found) == 1 else []


def large_files(path: Path) -> list[Path]:
    """Of a directory the large safetensors, else whatever is large."""
    if path.is_file():
        return [path]
    large = [each for each in path.iterdir() if each.is_file() and each.stat().st_size >= _LARGE]
    return [each for each in large if each.suffix == ".safetensors"] or large


def _wanted(model: "Model", settings: Settings) -> Iterator[Extent]:
    images = _images(settings, model.checkpoint.path)
    if images is not None:
        yield from (Extent(image, 0, image.stat().st_size) for image in images)
    elif settings.transcode == "none":  # otherwise the host decodes, weight by weight
        for weight in model.names.weights:
            placed = model.store.placed(weight) if model.store.has(weight) else None
            if placed is not None:
                yield from placed.extents
