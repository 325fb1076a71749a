"""The block formats of ggml: decoding in numpy, which is the truth about them, and encoding of most."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict
from atlas_quant_gguf.decode import DECODERS
from atlas_quant_gguf.encode import ENCODERS
from atlas_quant_gguf.ggml import BY_NAME

_F16_STEP = 2.0**-11  # relative rounding of a float16 scale, for scales of at least 2**-14
# Half a step of the code, plus the rounding of what the code is multiplied with (and added to). q4_0 has one code fewer
# on the side opposite to the largest weight, so that side may miss by a whole step.
_BOUNDS = {
    "q4_0": 1 / 8 + _F16_STEP,
    "q4_1": 2 / 15 / 2 + 3 * _F16_STEP,
    "q5_0": 1 / 16 + _F16_STEP,
    "q5_1": 2 / 31 / 2 + 3 * _F16_STEP,
    "q8_0": 1 / 127 / 2 + _F16_STEP,
    # Of 256 weights; scales and minima are rounded up to a 63rd, 127th or 31st of the largest.
    "q4_k": 2 / 15 / 2 * 64**2 / 63**2 + 3 * _F16_STEP,
    "q5_k": 2 / 31 / 2 * 64**2 / 63**2 + 3 * _F16_STEP,
    "q6_k": 1 / 31 / 2 * 128 / 127 + _F16_STEP,
    "iq4_xs": 24 / 2 / 113 * 32 / 31 + _F16_STEP,
}


class GgufFormat:
    """Block-quantised tensors. Plain arrays inside a GGUF file belong to the format ``plain``."""

    name = "gguf"
    layouts: Sequence[StorageLayout] = tuple(BY_NAME[name] for name in DECODERS if BY_NAME[name].block > 1)

    def detect(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Verdict:
        """Yes when a tensor has one of ggml's block layouts and none an unknown one."""
        owned = {layout.name for layout in self.layouts}
        blocks = sorted({info.layout for info in tensors.values()} & owned)
        unread = sorted(
            {info.layout for info in tensors.values() if info.layout in BY_NAME and BY_NAME[info.layout].block > 1}
            - owned
        )
        if unread:
            return Verdict.no(f"tensors are stored as {', '.join(unread)}, which cannot be decoded")
        if not blocks:
            return Verdict.no("no tensor has a ggml block layout")
        return Verdict.yes(0, f"tensors are stored as {', '.join(blocks)}")

    def decode(self, layout: str, data: bytes | memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of ``shape``, bit for bit what ggml's own conversion gives. Raises CheckpointError on wrong size."""
        if layout not in DECODERS:
            raise CheckpointError(
                f"the GGUF layout {layout!r} cannot be decoded",
                f"known are {', '.join(DECODERS)}",
                "use a file that is quantised otherwise",
            )
        described = BY_NAME[layout]
        try:
            expected = described.nbytes(shape)
        except ValueError as error:
            raise CheckpointError(f"a {layout} tensor cannot have the shape {shape}", str(error)) from error
        if len(data) != expected:
            raise CheckpointError(
                f"a {layout} tensor of shape {shape} has {len(data)} bytes",
                f"{expected} bytes are expected",
                "use an intact file",
            )
        blocks = np.frombuffer(data, np.uint8).reshape(-1, described.block_bytes)
        return DECODERS[layout](blocks).reshape(shape)

    def encode(self, layout: str, values: np.ndarray) -> bytes:
        """Blocks of 32: ggml's reference quantisation without an importance matrix, bit for bit; of 256: nearest codes.

        Raises CheckpointError for layouts that are only read.
        """
        if layout not in ENCODERS:
            raise CheckpointError(
                f"the GGUF layout {layout!r} is only read", f"written are {', '.join(ENCODERS)}", "choose one of them"
            )
        block = BY_NAME[layout].block
        if values.ndim == 0 or values.shape[-1] % block:
            raise CheckpointError(
                f"an array of shape {values.shape} cannot be stored as {layout}",
                f"rows are a multiple of {block} long",
                "pad the rows",
            )
        return ENCODERS[layout](np.ascontiguousarray(values, np.float32).reshape(-1, block)).tobytes()

    def error_bound(self, layout: str) -> float:
        """See contracts.quant.QuantFormat. Holds while the block's float16 scale is a normal number."""
        if layout not in _BOUNDS:
            raise CheckpointError(
                f"the GGUF layout {layout!r} is only read", f"written are {', '.join(_BOUNDS)}", "choose one of them"
            )
        return _BOUNDS[layout]
