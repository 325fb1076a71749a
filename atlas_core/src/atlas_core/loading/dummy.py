"""Random weights in place of a checkpoint's (``--load-format dummy``): same shapes, same bytes to move, no download."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist

import ml_dtypes
import numpy as np
import numpy.typing as npt

from atlas_core.contracts.checkpoint import TokenizerSource
from atlas_core.contracts.model import NameMap
from atlas_core.loading.accounting import sources_by_tensor
from atlas_core.loading.directory import ModelDirectory
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import TensorInfo

STDDEV = 0.02
_CHUNK = 1 << 16  # values copied at a time
_POOL = 1 << 22
_LAYOUT = plain(DType.BF16)


class DummyCheckpoint:
    """bfloat16 weights drawn from N(0, 0.02); one-dimensional weights whose name says norm are such that 1 is used.

    Good for measuring speed. Tokens are small beside what the first layers add to them, so that rounding decides what a deep model says.
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
        self.tensors: Mapping[str, TensorInfo] = dict(_tensors(names, shapes))
        # Norms that are stored less one: what is added to them when they are read.
        self._offsets = {stored: source.offset for source in names.weights.values() for stored in source.names}

    def layout(self, name: str) -> StorageLayout:
        """bfloat16, the only one. Raises CheckpointError for another."""
        if name != _LAYOUT.name:
            raise CheckpointError(f"dummy weights have no layout {name!r}", f"they are {_LAYOUT.name}")
        return _LAYOUT

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> memoryview:
        """See contracts.checkpoint.Checkpoint.read."""
        if name not in self.tensors:
            raise CheckpointError(f"there is no dummy tensor {name!r}", "the model's program did not ask for it")
        info = self.tensors[name]
        count = info.shape[0] if info.shape else 1
        width = info.nbytes // _LAYOUT.block_bytes // max(count, 1)
        ranges = [(0, count)] if rows is None else list(rows)
        if any(not 0 <= start <= end <= count for start, end in ranges):
            raise CheckpointError(f"the dummy tensor {name} has {count} rows", f"rows {ranges} were asked for")
        out = np.empty(sum(end - start for start, end in ranges) * width, np.uint16)
        filled = 0
        for start, end in ranges:
            size = (end - start) * width
            self._fill(out[filled : filled + size], name, start * width)
            filled += size
        return out.view(np.uint8).data

    def tokenizer(self) -> TokenizerSource:
        """The directory's own. Raises CheckpointError when there is none."""
        return self._directory.tokenizer()

    def close(self) -> None:
        """Nothing is open."""

    def _fill(self, out: np.ndarray, name: str, position: int) -> None:
        if len(self.tensors[name].shape) == 1 and "norm" in name:
            out[:] = np.array([1 - self._offsets.get(name, 0.0)], ml_dtypes.bfloat16).view(np.uint16)
            return
        pool = _pool()
        end = position + len(out)
        for chunk in range(position // _CHUNK, -(-end // _CHUNK)):
            first = chunk * _CHUNK
            low, high = max(position, first), min(end, first + _CHUNK)
            shift = _offset(self._seed, name, chunk) - first
            out[low - position : high - position] = pool[low + shift : high + shift]


def _offset(seed: int, name: str, chunk: int) -> int:
    """Where in the pool a chunk of a tensor begins."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{chunk}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (_POOL - _CHUNK)


@cache
def _pool() -> npt.NDArray[np.uint16]:
    """Bits of independent bfloat16 values of N(0, STDDEV), by inversion: 65,536 equally likely ones.

    Chunks are stretches of it: drawing every weight anew would take a minute for 8 billion.
    """
    normal = NormalDist(0.0, STDDEV)
    values = np.array([normal.inv_cdf((index + 0.5) / 65536) for index in range(65536)], np.float32)
    table = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    pool: npt.NDArray[np.uint16] = table[np.random.default_rng(0).integers(0, 65536, _POOL, np.uint16)]
    pool.flags.writeable = False
    return pool


def _tensors(names: NameMap, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, TensorInfo]]:
    unknown = sorted(shapes.keys() - names.weights.keys())
    if unknown:
        raise CheckpointError(
            f"the model's program asks for {unknown[0]}, which its name map does not have",
            "the model plugin contradicts itself",
            "report it to the plugin's authors",
        )
    wanted = {name: names.weights[name] for name in shapes if names.weights[name].tied_to is None}
    tensors = []
    for stored, users in sources_by_tensor(wanted).items():
        # Weights cut out of one fused tensor name its rows; the tensor is as long as the last of them.
        lengths = [1 + max(order) for user in users if (order := wanted[user].row_order) is not None]
        shape = shapes[users[0]]
        if not wanted[users[0]].names:
            shape = shape[1:]  # one expert of a stack
        if lengths:
            shape = (max(lengths), *shape[1:])
        tensors.append((stored, TensorInfo(stored, shape, _LAYOUT.name, _LAYOUT.nbytes(shape))))
    return tensors
