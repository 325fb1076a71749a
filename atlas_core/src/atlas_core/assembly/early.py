"""Which bytes of a start's files are wanted first, as far as that is known before there is a plan."""

from collections.abc import Iterator
from pathlib import Path

from atlas_core.assembly.model import Model
from atlas_core.assembly.packed import images
from atlas_core.contracts.checkpoint import Extent
from atlas_core.loading.ahead import ReadAhead
from atlas_core.settings import Settings


def begin_reading(model: Model, settings: Settings) -> ReadAhead:
    """Reads the image that will most likely be used, else the tensors that go to the device as they are."""
    return ReadAhead(_wanted(model, settings))


def _wanted(model: Model, settings: Settings) -> Iterator[Extent]:
    if settings.packed_cache is not None:
        found = images(Path(settings.packed_cache).expanduser(), model.checkpoint)
        if found:
            # Which of several it will be is not known yet.
            yield from [Extent(path, 0, path.stat().st_size) for path in found] if len(found) == 1 else []
            return
    if settings.transcode != "none":
        return  # decoded by the host, which reads weight by weight
    for weight in model.names.weights:
        placed = model.store.placed(weight) if model.store.has(weight) else None
        if placed is not None:
            yield from placed.extents
