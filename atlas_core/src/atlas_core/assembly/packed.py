"""The packed image of a model's weights (``--packed-cache``): what it is called, what makes it stale, and when it is used."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from atlas_core.assembly.early import image_stem
from atlas_core.contracts.backend import GpuBackend
from atlas_core.contracts.checkpoint import Checkpoint, Located
from atlas_core.loading.ahead import ReadAhead
from atlas_core.loading.image import Progress, open_image, write_image
from atlas_core.loading.pieces import WeightSource
from atlas_core.loading.upload import WeightLoading, begin_packed, begin_weights
from atlas_core.runtime.loader import WeightCopy, WeightMemory
from atlas_core.vocab.errors import CheckpointError


class PackedCache(Struct):
    """One model's image. ``reason`` tells, once the weights are there, why it is to be written; empty when they came out of it."""

    path: Path
    identity: dict[str, str]
    reason: str = ""

    @classmethod
    def of(
        cls, folder: Path, checkpoint: Checkpoint, copies: Iterable[WeightCopy], target: str, plugins: Iterable[Any], kernels: str
    ) -> "PackedCache":  # fmt: skip
        """``plugins`` and ``kernels`` identify those who pack: what is installed, and the digest of the target's binaries.

        A model has an image for each target and packing of its weights; of each there is one, whatever was installed when.
        """
        packed = _digest((target, *((c.weight, c.packed, c.spec.layout, c.spec.shape) for c in copies)))
        path = folder / f"{image_stem(Path(checkpoint.path))}-{packed[:8]}.packed"
        identity = {
            "checkpoint": _files(checkpoint),
            "plugins": _digest(plugins),
            "kernels": kernels,
            "packing": packed,
        }
        return cls(path, identity)

    def load(
        self, backend: GpuBackend, copies: Iterable[WeightCopy], source: WeightSource, progress: Progress,
        ahead: ReadAhead | None = None,
    ) -> WeightLoading:  # fmt: skip
        """Done, out of the image; or begun, from the checkpoint, where there is none that can be used."""
        listed = tuple(copies)
        try:
            image = open_image(self.path, listed, self.identity)
            if image is not None:
                loading = begin_packed(backend, listed, image, ahead)
                loading.finish(progress)
                return loading
            self.reason = "there was none"
        except CheckpointError as error:
            self.reason = f"{error.what}: {error.why}"
        return begin_weights(backend, listed, source, ahead)

    def keep(self, backend: GpuBackend, memory: WeightMemory, copies: Iterable[WeightCopy], progress: Progress) -> None:
        """Write the image. Raises CheckpointError when it cannot be written."""
        write_image(self.path, backend, memory, tuple(copies), self.identity, progress)


def _files(checkpoint: Checkpoint) -> str:
    """Of the files with tensors and those beside them: reading them all for a digest would take as long as loading them."""
    path = Path(checkpoint.path)
    found = {path} if path.is_file() else {each for each in path.iterdir() if each.is_file()}
    if isinstance(checkpoint, Located):
        found |= {checkpoint.extent(name).path for name in checkpoint.tensors}
    stats = [(each.name, each.stat()) for each in sorted(found)]
    return _digest((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _digest(parts: Iterable[Any]) -> str:
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()
