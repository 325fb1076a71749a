"""Numbers of eight and four bits with the scales of their files: what FP8 and NVFP4 checkpoints become when they are read."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from atlas_core.contracts.checkpoint import Checkpoint
from atlas_core.loading.scaled import with_scales
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.ops.scaled import E4M3_ROW, E4M3_TILE, LAYOUTS, NVFP4, row_type
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E4M3_MOST, _E2M1_MOST = np.float32(448), np.float32(6)
_HIGH = 128  # rows of a tile, as files have them
# Half of a step at a block's largest number, and the rounding of scale and product. A scale of NVFP4 is rounded too, by a 16th.
_BOUNDS = {**dict.fromkeys((layout.name for layout in LAYOUTS), 1 / 16 + 2.0**-22), NVFP4.name: 0.18}


class ScaledFormat:
    """weight = scale × number."""

    name = "scaled"
    layouts: Sequence[StorageLayout] = LAYOUTS

    def detect(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Verdict:
        """Yes when a tensor has one of the layouts, and none is eight or four bits wide without a scale."""
        alone = next((name for name, info in tensors.items() if info.layout in ("f8e4m3", "f8e5m2", "f4", "u8")), None)
        if alone is not None:
            return Verdict.no(f"{alone} is stored as {tensors[alone].layout}, and no scale goes with it")
        found = sorted({info.layout for info in tensors.values()} & set(_BOUNDS))
        return (
            Verdict.yes(0, f"tensors are read as {', '.join(found)}") if found else Verdict.no("no tensor has scales")
        )

    def assemble(self, checkpoint: Checkpoint) -> Checkpoint:
        """See contracts.quant.Assembling."""
        return with_scales(checkpoint)

    def decode(self, layout: str, data: bytes | memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of ``shape``: one product each. Raises CheckpointError on another layout or size."""
        own = self._own(layout)
        if len(data) != own.nbytes(shape):
            raise CheckpointError(
                f"a {layout} tensor of shape {shape} has {len(data)} bytes", f"{own.nbytes(shape)} bytes are expected"
            )
        rows = np.frombuffer(data, row_type(own, shape[-1]))
        if own == E4M3_ROW:
            values = _e4m3()[rows["codes"]]
            values *= rows["scale"][:, None]
        else:
            blocks = rows["blocks"]
            if own == NVFP4:
                values = _e2m1_pairs()[blocks["codes"]].view(np.float32)
                scales = _e4m3()[blocks["scale"]] * rows["times"][:, None] / rows["by"][:, None]
            else:
                values, scales = _e4m3()[blocks["codes"]], blocks["scale"]
            values *= scales[..., None]
        decoded: np.ndarray = values.reshape(shape)
        return decoded

    def encode(self, layout: str, values: np.ndarray) -> bytes:
        """Nearest numbers, the largest magnitude of what shares a scale being the format's largest. Raises CheckpointError when rows are no whole blocks."""
        own = self._own(layout)
        if values.ndim == 0 or values.shape[-1] % own.block:
            raise CheckpointError(
                f"an array of shape {values.shape} cannot be {layout}", f"rows are a multiple of {own.block} long"
            )
        columns = values.shape[-1]
        plain = np.ascontiguousarray(values, np.float32).reshape(-1, columns)
        rows = np.empty(len(plain), row_type(own, columns))
        if own == E4M3_ROW:
            rows["scale"] = np.abs(plain).max(axis=1) / _E4M3_MOST
            rows["codes"] = _nearest_e4m3(plain, rows["scale"][:, None])
            return rows.tobytes()
        blocks, parts = rows["blocks"], plain.reshape(len(plain), -1, own.block)
        largest = np.abs(parts).max(axis=2)
        if own == NVFP4:
            rows["times"], rows["by"] = largest.max(axis=1) / (_E4M3_MOST * _E2M1_MOST), 1
            blocks["scale"] = _nearest_e4m3(largest / _E2M1_MOST, rows["times"][:, None])
            scales = _e4m3()[blocks["scale"]] * rows["times"][:, None]
            ratios = parts / np.where(scales == 0, np.float32(1), scales)[..., None]
            nearest = np.abs(np.abs(ratios)[..., None] - _E2M1).argmin(-1).astype(np.uint8) | (ratios < 0) * np.uint8(8)
            blocks["codes"] = nearest[..., ::2] | nearest[..., 1::2] << 4
        else:
            high = values.shape[-2] if values.ndim > 1 else 1
            blocks["scale"] = (_shared(largest, high) if own == E4M3_TILE else largest) / _E4M3_MOST
            blocks["codes"] = _nearest_e4m3(parts, blocks["scale"][..., None])
        return rows.tobytes()

    def error_bound(self, layout: str) -> float:
        """See contracts.quant.QuantFormat."""
        self._own(layout)
        return _BOUNDS[layout]

    def _own(self, layout: str) -> StorageLayout:
        for own in self.layouts:
            if own.name == layout:
                return own
        raise CheckpointError(
            f"the scaled format has no layout {layout!r}", f"it has {', '.join(_BOUNDS)}", "ask the format that owns it"
        )


def _shared(largest: np.ndarray, high: int) -> np.ndarray:
    """For each row of matrices of ``high`` rows the largest of its tile of _HIGH rows, [rows, blocks] both."""
    matrices = largest.reshape(-1, high, largest.shape[1])
    starts = np.arange(0, high, _HIGH)
    most = np.maximum.reduceat(matrices, starts, axis=1)
    chosen: np.ndarray = most[:, np.arange(high) // _HIGH].reshape(largest.shape)
    return chosen


def _nearest_e4m3(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes of ``values`` / ``scales``; of zeros where the scale is zero."""
    ratios = values / np.where(scales == 0, np.float32(1), scales)
    return np.clip(ratios, -448, 448).astype(numpy_dtype(DType.F8E4M3)).view(np.uint8)


@cache
def _e4m3() -> np.ndarray:
    """The 256 numbers of float8 e4m3 as float32; two of them are NaN."""
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(DType.F8E4M3)).astype(np.float32)


@cache
def _e2m1_pairs() -> np.ndarray:
    """For each byte the two numbers in its halves, the low one first, as 64 bits that hold two float32."""
    signed, byte = np.concatenate([_E2M1, -_E2M1]), np.arange(256)
    return np.stack([signed[byte & 15], signed[byte >> 4]], axis=-1).view(np.uint64).reshape(-1)
