"""Random weights in place of a checkpoint's (``--load-format dummy``): same shapes, same bytes to move, no download."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from atlas_core.contracts.checkpoint import TokenizerSource
from atlas_core.contracts.model import NameMap, WeightSource
from atlas_core.loading.accounting import sources_by_tensor
from atlas_core.loading.directory import ModelDirectory
from atlas_core.loading.drawn import Stretch, deviation, pool, stretches, vector
from atlas_core.loading.stated import StatedLayouts, made_up
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.ops.scaled import LAYOUTS
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import TensorInfo

_LAYOUT = plain(DType.BF16)


class DummyCheckpoint:
    """bfloat16 weights as ``loading.drawn`` makes them up, FP8 and NVFP4 ones where config.json states them. Good for measuring speed,
    and for comparing ways of computing.

    Every tensor is a function of (seed, its name): reads of parts, in any order, agree. See contracts.checkpoint.Checkpoint.
    """

    naming = "hf"

    def __init__(self, path: Path, names: NameMap, shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0) -> None:
        """``path`` is a directory with config.json; ``shapes`` has the canonical weights that the model's program asks for.

        ``names`` is the model's map for the scheme ``hf``. Tied weights are left out, as checkpoints do.
        """
        directory = ModelDirectory(path)
        self.path = path
        self.config = directory.config
        self.generation_config = directory.generation_config
        self.quantization: Mapping[str, object] = {}
        self.pooling = directory.pooling()
        self._directory = directory
        self._seed = seed
        wanted = _wanted(names, shapes)
        users = sources_by_tensor(wanted)
        stated = StatedLayouts(directory.quantization)
        self.tensors: Mapping[str, TensorInfo] = {
            stored: _tensor(stored, [wanted[user] for user in found], shapes[found[0]], stated)
            for stored, found in users.items()
        }
        tied = {names.weights[name].tied_to for name in shapes}
        self._spreads: dict[str, float] = {}
        self._vectors: dict[str, tuple[str, float]] = {}  # canonical name, and what is added when it is read
        for tensor, (user, *_) in users.items():
            if len(shapes[user]) == 1:
                self._vectors[tensor] = user, names.weights[user].offset
            else:
                self._spreads[tensor] = deviation(user, shapes[user], tied=user in tied)

    def layout(self, name: str) -> StorageLayout:
        """bfloat16, or one of LAYOUTS. Raises CheckpointError for another."""
        known = {layout.name: layout for layout in (_LAYOUT, *LAYOUTS)}
        if name not in known:
            raise CheckpointError(f"dummy weights have no layout {name!r}", f"they are {', '.join(known)}")
        return known[name]

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> memoryview:
        """See contracts.checkpoint.Checkpoint.read."""
        if name not in self.tensors:
            raise CheckpointError(f"there is no dummy tensor {name!r}", "the model's program did not ask for it")
        count = self._rows(name)
        ranges = [(0, count)] if rows is None else list(rows)
        if any(not 0 <= start <= end <= count for start, end in ranges):
            raise CheckpointError(f"the dummy tensor {name} has {count} rows", f"rows {ranges} were asked for")
        layout = self.layout(self.tensors[name].layout)
        if layout != _LAYOUT:
            found = [(each.start, each.count) for each in self._stretches(name, ranges)]
            return made_up(layout, self.tensors[name].shape[-1], self._spreads[name], found).data
        drawn = self.stretches(name, ranges)
        if drawn is not None:
            parts = [pool(stretch.deviation)[stretch.start :][: stretch.count] for stretch in drawn]
        else:
            user, offset = self._vectors[name]
            whole = (
                (vector(self._seed, user, count) - np.float32(offset)).astype(numpy_dtype(DType.BF16)).view(np.uint16)
            )
            parts = [whole[start:end] for start, end in ranges]
        return np.concatenate([*parts, np.empty(0, np.uint16)]).view(np.uint8).data

    def stretches(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> list[Stretch] | None:
        """See loading.drawn.Drawing."""
        if name not in self._spreads or self.tensors[name].layout != _LAYOUT.name:
            return None
        return self._stretches(name, [(0, self._rows(name))] if rows is None else rows)

    def _stretches(self, name: str, rows: Sequence[tuple[int, int]]) -> list[Stretch]:
        width = prod(self.tensors[name].shape[1:])
        return [
            stretch
            for start, end in rows
            for stretch in stretches(self._seed, name, self._spreads[name], start * width, (end - start) * width)
        ]

    def tokenizer(self) -> TokenizerSource:
        """The directory's own. Raises CheckpointError when there is none."""
        return self._directory.tokenizer()

    def close(self) -> None:
        """Nothing is open."""

    def _rows(self, name: str) -> int:
        shape = self.tensors[name].shape
        return shape[0] if shape else 1


def _wanted(names: NameMap, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, WeightSource]:
    """The weights that have tensors of their own."""
    unknown = sorted(shapes.keys() - names.weights.keys())
    if unknown:
        raise CheckpointError(
            f"the model's program asks for {unknown[0]}, which its name map does not have",
            "the model plugin contradicts itself",
            "report it to the plugin's authors",
        )
    return {name: names.weights[name] for name in shapes if names.weights[name].tied_to is None}


def _tensor(
    stored: str, users: Sequence[WeightSource], shape: tuple[int, ...], stated: StatedLayouts
) -> TensorInfo:  # fmt: skip
    """``shape`` is that of the first of its users."""
    if not users[0].names:
        shape = shape[1:]  # one expert of a stack
    # Weights cut out of one fused tensor name its rows; the tensor is as long as the last of them.
    lengths = [1 + max(user.row_order) for user in users if user.row_order is not None]
    if lengths:
        shape = (max(lengths), *shape[1:])
    layout = stated.of(stored, shape) or _LAYOUT
    return TensorInfo(stored, shape, layout.name, layout.nbytes(shape))
