"""Streaming kernels with rings that fit 99 KB of shared memory. Names are those of the NVIDIA baseline, which these replace."""

from collections.abc import Mapping

from msgspec.structs import replace

from atlas_core.contracts.ops import OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_nvidia.implementations.attention import GROUPS, Decode
from atlas_nvidia.implementations.base import ELEMENTS
from atlas_nvidia.implementations.coded_experts import Blocks, CodedStreamed, WideCodedStreamed
from atlas_nvidia.implementations.fused import (
    COLUMNS,
    NormGateUpSilu,
    NormLinears,
    NormQkvBiasRopeAppend,
    NormQkvHeadsRopeAppend,
    NormQkvRopeAppend,
)
from atlas_nvidia.implementations.heads import NormThenHeads
from atlas_nvidia.implementations.linear import DEPTH, Streamed, streaming_bytes
from atlas_nvidia.implementations.moe import SORTED, STREAMED
from atlas_nvidia.implementations.moe import Streamed as StreamedExperts
from atlas_nvidia.implementations.route import NormRoute
from atlas_nvidia.implementations.scaled import FORMATS, streamed
from atlas_nvidia.implementations.scaled_fused import normed

DEPTHS = {8: 3, 16: 2}
"""GEMV_DEPTH of the instances of linear_gemv, by the tokens that they take (kernels/gb10/common/KERNEL.toml)."""
NORM_DEPTH = 2
"""GEMV_DEPTH of norm_qkv, norm_gate_up, norm_linears and norm_route, MOE_DEPTH of moe_gate_up and moe_down."""
HEAD, DECODE_WARPS = 128, 4
"""Of the instances of paged_decode that a block has no room for otherwise: head size, and DECODE_WARPS."""
SCALED_DEPTHS = (2, 3)
"""SCALED_DEPTH of the streaming kernels, by format."""
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


class ShallowNormQkvBias(NormQkvBiasRopeAppend):
    """The same with biases."""

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        return super().shared(need) - _SAVED


class ShallowNormQkvHeads(NormQkvHeadsRopeAppend):
    """The same with norms of the heads."""

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        return super().shared(need) - _SAVED


class ShallowNormThenHeads(NormThenHeads):
    """The same in two launches."""

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        return super().shared(need) - _SAVED


class ShallowDecode(Decode):
    """Attention of one query a sequence over heads of 128: fewer warps, each with as much in flight, and no other shapes of blocks."""

    def __init__(self, group: int, element: DType = DType.BF16) -> None:
        super().__init__(HEAD, group, element)
        self.warps = DECODE_WARPS
        self.kernels = self.kernels[:1]


class ShallowNormRoute(NormRoute):
    """The choice of experts."""

    depth = NORM_DEPTH


class ShallowExperts(StreamedExperts):
    """Few tokens' experts, 8 tokens of one at a time; for width 2048."""

    depths: Mapping[int, tuple[int, int]] = {8: (NORM_DEPTH, NORM_DEPTH)}


class ShallowCodedExperts(CodedStreamed):
    """The same for NVFP4."""

    gate_up = Blocks(8, 3)
    down: Mapping[int, Blocks] = {8: Blocks(8, 2, 2)}


class ShallowWideCodedExperts(WideCodedStreamed):
    """The same for FP8."""

    gate_up = Blocks(8, 2)
    down: Mapping[int, Blocks] = {8: Blocks(8, 2, 2)}


class ShallowNormGateUp(NormGateUpSilu):
    """The first half of a feed-forward network; at width 4096 for up to 4 tokens."""

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        return super().shared(need) - _SAVED


class ShallowNormLinears(NormLinears):
    """What linear attention begins with."""

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        return super().shared(need) - _SAVED


def implementations() -> list[OpImplementation]:
    """What this machine does otherwise than the baseline."""
    scaled = [replace(each, depth=depth) for each, depth in zip(FORMATS, SCALED_DEPTHS, strict=True)]
    return [
        *streamed(scaled),
        *normed(scaled),
        *(made(8, op) for op in SORTED for made in (ShallowCodedExperts, ShallowWideCodedExperts)),
        *(
            made
            for element in ELEMENTS
            for made in (
                ShallowNormQkv(element),
                ShallowNormQkvBias(element),
                ShallowNormQkvHeads(element),
                ShallowNormThenHeads(element),
                ShallowNormGateUp(element),
                ShallowNormRoute(element),
                *(ShallowExperts(8, op, element) for op in STREAMED),
                ShallowNormLinears(element),
                *(ShallowDecode(group, element) for group in GROUPS[element][HEAD]),
                *(ShallowStreamed(columns, residual, element) for columns in DEPTHS for residual in (False, True)),
            )
        ),
    ]
