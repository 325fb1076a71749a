"""Numbers of eight and four bits with a float32 scale for each few: what FP8 and NVFP4 checkpoints become when they are read."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from atlas_core.contracts.checkpoint import Checkpoint
from atlas_core.loading.scaled import E2M1_BLOCK, E4M3_BLOCK, SCALED_E2M1, SCALED_E4M3, with_scales
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_LARGEST = {SCALED_E4M3.name: np.float32(448), SCALED_E2M1.name: np.float32(6)}
# Half of the largest step, that below the largest number, and the rounding of scale and product.
_BOUNDS = {SCALED_E4M3.name: 16 / 448 + 2.0**-22, SCALED_E2M1.name: 1 / 6 + 2.0**-22}


class ScaledFormat:
    """weight = scale × number."""

    name = "scaled"
    layouts: Sequence[StorageLayout] = (SCALED_E4M3, SCALED_E2M1)

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
        block = self._own(layout)
        if len(data) != block.nbytes(shape):
            raise CheckpointError(
                f"a {layout} tensor of shape {shape} has {len(data)} bytes", f"{block.nbytes(shape)} bytes are expected"
            )
        if layout == SCALED_E4M3.name:
            blocks = np.frombuffer(data, E4M3_BLOCK)
            values = _e4m3()[blocks["codes"]]
        else:
            blocks = np.frombuffer(data, E2M1_BLOCK)
            values = _e2m1_pairs()[blocks["codes"]].view(np.float32)
        values *= blocks["scale"][:, None]
        decoded: np.ndarray = values.reshape(shape)
        return decoded

    def encode(self, layout: str, values: np.ndarray) -> bytes:
        """Nearest numbers, the largest magnitude of each block being the format's largest. Raises CheckpointError when rows are no whole blocks."""
        block = self._own(layout)
        if values.ndim == 0 or values.shape[-1] % block.block:
            raise CheckpointError(
                f"an array of shape {values.shape} cannot be {layout}", f"rows are a multiple of {block.block} long"
            )
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, block.block)
        scales = np.abs(rows).max(axis=1) / _LARGEST[layout]
        ratios = rows / np.where(scales == 0, np.float32(1), scales)[:, None]
        if layout == SCALED_E4M3.name:
            blocks = np.empty(len(rows), E4M3_BLOCK)
            blocks["codes"] = np.clip(ratios, -448, 448).astype(numpy_dtype(DType.F8E4M3)).view(np.uint8)
        else:
            blocks = np.empty(len(rows), E2M1_BLOCK)
            nearest = np.abs(np.abs(ratios)[..., None] - _E2M1).argmin(-1).astype(np.uint8) | (ratios < 0) * np.uint8(8)
            blocks["codes"] = nearest[:, ::2] | nearest[:, 1::2] << 4
        blocks["scale"] = scales
        return blocks.tobytes()

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


@cache
def _e4m3() -> np.ndarray:
    """The 256 numbers of float8 e4m3 as float32; two of them are NaN."""
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(DType.F8E4M3)).astype(np.float32)


@cache
def _e2m1_pairs() -> np.ndarray:
    """For each byte the two numbers in its halves, the low one first, as 64 bits that hold two float32."""
    signed, byte = np.concatenate([_E2M1, -_E2M1]), np.arange(256)
    return np.stack([signed[byte & 15], signed[byte >> 4]], axis=-1).view(np.uint64).reshape(-1)
