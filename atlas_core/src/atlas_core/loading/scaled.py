"""FP8 and NVFP4 checkpoints of Hugging Face: a weight and the tensors of its scales, read as one.

Four tools write them, in these ways; ``M`` is the module's name, [o, i] the weight's shape:

- FP8 in blocks (DeepSeek, Qwen, MiniMax): ``M.weight`` e4m3, ``M.weight_scale_inv`` [⌈o/128⌉, ⌈i/128⌉], multiplied;
- FP8 by rows or tensors (compressed-tensors, ModelOpt): ``M.weight`` e4m3, ``M.weight_scale`` [o, 1], [1] or [];
- NVFP4 of ModelOpt: ``M.weight`` u8 [o, i/2], ``M.weight_scale`` e4m3 [o, i/16], ``M.weight_scale_2`` [], both multiplied;
- NVFP4 of compressed-tensors: ``M.weight_packed``, ``M.weight_scale``, and ``M.weight_global_scale``, which divides.

Scales of activations and of the cache are left aside: neither is rounded to what they are for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from atlas_core.contracts.checkpoint import Checkpoint, Pooled, Pooling, TokenizerSource
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.ops.scaled import E4M3_BLOCK, E4M3_ROW, E4M3_TILE, LAYOUTS, NVFP4, TILE_ROWS, code_blocks, row_type
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.model import TensorInfo

_ASIDE = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
_CURE = "use another copy of the model"


class _Weight(Struct, frozen=True):
    """``codes`` are scaled by ``scales``, one for each ``tile`` (rows, columns) of the weight of ``shape``; ``whole`` is for all of it."""

    codes: str
    shape: tuple[int, ...]
    layout: StorageLayout
    scales: str
    tile: tuple[int, int]
    whole: str = ""
    divides: bool = False


def with_scales(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with each weight and its scales as one tensor; itself where none has any. Raises CheckpointError for scales that do not fit."""
    weights = _find(checkpoint)
    return ScaledCheckpoint(checkpoint, weights) if weights else checkpoint


class ScaledCheckpoint:
    """A Checkpoint whose weights carry their scales; see contracts.checkpoint.Checkpoint."""

    def __init__(self, checkpoint: Checkpoint, weights: Mapping[str, _Weight]) -> None:
        self._checkpoint = checkpoint
        self._weights = weights
        self.path: Path = checkpoint.path
        self.naming = checkpoint.naming
        self.config = checkpoint.config
        self.generation_config = checkpoint.generation_config
        self.quantization = checkpoint.quantization
        parts = {part for weight in weights.values() for part in (weight.codes, weight.scales, weight.whole)}
        self.tensors: Mapping[str, TensorInfo] = {
            **{
                name: info
                for name, info in checkpoint.tensors.items()
                if name not in parts and not name.endswith(_ASIDE)
            },
            **{
                name: TensorInfo(name, weight.shape, weight.layout.name, weight.layout.nbytes(weight.shape))
                for name, weight in weights.items()
            },
        }

    @property
    def pooling(self) -> Pooling | None:
        """See contracts.checkpoint.Pooled."""
        return self._checkpoint.pooling if isinstance(self._checkpoint, Pooled) else None

    def layout(self, name: str) -> StorageLayout:
        """See contracts.checkpoint.Checkpoint.layout."""
        own = {layout.name: layout for layout in LAYOUTS}
        return own[name] if name in own else self._checkpoint.layout(name)

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> bytes | memoryview:
        """See contracts.checkpoint.Checkpoint.read."""
        weight = self._weights.get(name)
        if weight is None:
            return self._checkpoint.read(name, rows)
        parts = [self._rows(weight, *span) for span in (rows if rows is not None else [(0, weight.shape[0])])]
        return np.concatenate(parts).reshape(-1).view(np.uint8).data

    def tokenizer(self) -> TokenizerSource:
        """See contracts.checkpoint.Checkpoint.tokenizer."""
        return self._checkpoint.tokenizer()

    def close(self) -> None:
        """See contracts.checkpoint.Checkpoint.close."""
        self._checkpoint.close()

    def _rows(self, weight: _Weight, start: int, end: int) -> np.ndarray:
        """Rows [start, end) of ``row_type``."""
        rows = np.empty(end - start, row_type(weight.layout, weight.shape[1]))
        scales = self._scales(weight, start, end)
        codes = np.frombuffer(self._checkpoint.read(weight.codes, [(start, end)]), np.uint8)
        if weight.layout == E4M3_ROW:
            rows["codes"], rows["scale"] = codes.reshape(rows["codes"].shape), scales[:, 0]
            return rows
        blocks = rows["blocks"]
        whole = code_blocks(blocks)
        whole[...], blocks["scale"] = codes.view(whole.dtype).reshape(whole.shape), scales
        if weight.whole:
            rows["times"] = rows["by"] = 1
            rows["by" if weight.divides else "times"] = self._numbers(weight.whole).reshape(())
        return rows

    def _scales(self, weight: _Weight, start: int, end: int) -> np.ndarray:
        """Of each block of the rows, or of each row where blocks share it: float32, those of NVFP4 as they are stored."""
        if weight.layout == NVFP4:
            stored = np.frombuffer(self._checkpoint.read(weight.scales, [(start, end)]), np.uint8)
            return stored.reshape(end - start, weight.shape[1] // NVFP4.block)
        (high, wide), (height, columns) = weight.tile, weight.shape
        across = (
            np.arange(1 if weight.layout == E4M3_ROW else columns // weight.layout.block) * weight.layout.block // wide
        )
        if high >= height and wide >= columns:
            return np.broadcast_to(self._numbers(weight.scales).reshape(1, 1), (end - start, len(across)))
        first, last = start // high, -(-end // high)
        scales = self._numbers(weight.scales, [(first, last)]).reshape(last - first, -(-columns // wide))
        down = np.arange(start, end) // high - first
        chosen: np.ndarray = scales[down][:, across]
        return chosen

    def _numbers(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> np.ndarray:
        scalar = self._checkpoint.layout(self._checkpoint.tensors[name].layout).scalar
        if scalar is None:
            raise CheckpointError(f"the scales {name} of {self.path} are no plain numbers", "", _CURE)
        return np.frombuffer(self._checkpoint.read(name, rows), numpy_dtype(scalar)).astype(np.float32)


def _find(checkpoint: Checkpoint) -> dict[str, _Weight]:
    found: dict[str, _Weight] = {}
    tensors = checkpoint.tensors
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and info.layout == "f8e4m3" and len(info.shape) == 2:
            scales = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in tensors), None)
            if scales is not None:
                tile = _tile(checkpoint, info, tensors[scales])
                found[name] = _checked(checkpoint, _Weight(name, info.shape, _layout(info.shape, tile), scales, tile))
        elif info.layout == "u8" and len(info.shape) == 2 and part in ("weight", "weight_packed"):
            packed = part == "weight_packed"
            scales, whole = f"{module}.weight_scale", f"{module}.weight_{'global_scale' if packed else 'scale_2'}"
            if scales in tensors and whole in tensors:
                shape = (info.shape[0], 2 * info.shape[1])
                weight = _Weight(name, shape, NVFP4, scales, (1, NVFP4.block), whole, packed)
                found[f"{module}.weight"] = _checked(checkpoint, weight)
    return found


def _layout(shape: tuple[int, ...], tile: tuple[int, int]) -> StorageLayout:
    """The narrowest that has a place for scales of tiles (rows, columns)."""
    high, wide = tile
    if wide >= shape[1]:
        return E4M3_ROW
    whole = wide % E4M3_TILE.block == 0 and shape[1] % E4M3_TILE.block == 0
    return E4M3_TILE if whole and high % TILE_ROWS == 0 else E4M3_BLOCK


def _tile(checkpoint: Checkpoint, weight: TensorInfo, scales: TensorInfo) -> tuple[int, int]:
    """Rows and columns that share a scale. Raises CheckpointError when the number of scales fits none of the known ways."""
    rows, columns = weight.shape
    if scales.shape in ((), (1,)):
        return rows, columns
    if scales.shape in ((rows, 1), (rows,)):
        return 1, columns
    given = checkpoint.quantization.get("weight_block_size")
    if isinstance(given, list) and len(given) == 2 and all(type(part) is int and part > 0 for part in given):
        high, wide = given
        if scales.shape == (-(-rows // high), -(-columns // wide)) and wide % E4M3_BLOCK.block == 0:
            return high, wide
    raise CheckpointError(
        f"{scales.name} of {checkpoint.path} has the shape {list(scales.shape)} for a weight of {[rows, columns]}",
        f"scales are for the tensor, its rows, or blocks of weight_block_size, which is {given!r}",
        _CURE,
    )


def _checked(checkpoint: Checkpoint, weight: _Weight) -> _Weight:
    """Raises CheckpointError when rows are no whole blocks, or scales of NVFP4 have another shape."""
    rows, columns = weight.shape
    if columns % weight.layout.block:
        raise CheckpointError(
            f"{weight.codes} of {checkpoint.path} has rows of {columns}",
            f"they are read in blocks of {weight.layout.block}",
            _CURE,
        )
    scales = checkpoint.tensors[weight.scales]
    if weight.whole and scales.shape != (rows, columns // weight.layout.block):
        raise CheckpointError(
            f"{scales.name} of {checkpoint.path} has the shape {list(scales.shape)}",
            f"{[rows, columns // weight.layout.block]} is expected",
            _CURE,
        )
    return weight
