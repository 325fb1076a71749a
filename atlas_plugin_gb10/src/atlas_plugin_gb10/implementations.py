"""Streaming kernels with rings that fit 99 KB of shared memory. Names are those of the NVIDIA baseline, which these replace."""

from atlas_core.contracts.ops import OpImplementation, OpNeed
from atlas_nvidia.implementations.base import ELEMENTS
from atlas_nvidia.implementations.fused import COLUMNS, NormGateUpSilu, NormQkvRopeAppend
from atlas_nvidia.implementations.linear import DEPTH, Streamed, streaming_bytes

DEPTHS = {8: 3, 16: 2}
"""GEMV_DEPTH of the instances of linear_gemv, by the tokens that they take (kernels/gb10/common/KERNEL.toml)."""
NORM_DEPTH = 2
"""GEMV_DEPTH of norm_qkv and norm_gate_up."""
_SAVED = streaming_bytes(COLUMNS, DEPTH) - streaming_bytes(COLUMNS, NORM_DEPTH)


class ShallowStreamed(Streamed):
    """A product with few tokens."""

    def _shared(self, need: OpNeed) -> int:
        depth = DEPTHS[self.columns]
        return streaming_bytes(self.columns, depth) + 8 * depth * 128 * need.operands["x"].shape[0]


class ShallowNormQkv(NormQkvRopeAppend):
    """Everything of a layer before its attention; at width 4096 for up to 4 tokens."""

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        return super().shared(need) - _SAVED


class ShallowNormGateUp(NormGateUpSilu):
    """The first half of a feed-forward network; at width 4096 for up to 4 tokens."""

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        return super().shared(need) - _SAVED


def implementations() -> list[OpImplementation]:
    """What this machine does otherwise than the baseline."""
    return [
        made
        for element in ELEMENTS
        for made in (
            ShallowNormQkv(element),
            ShallowNormGateUp(element),
            *(ShallowStreamed(columns, residual, element) for columns in DEPTHS for residual in (False, True)),
        )
    ]
