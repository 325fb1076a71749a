"""Attention of many queries a sequence on warpgroup products."""

from collections.abc import Sequence
from math import gcd

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, TensorMap, i32, ptr, tensor_map
from atlas_nvidia.implementations.attention import Attention, layer_address

WARPGROUP, ROWS = 128, 64
"""Threads of a warpgroup, and its rows: one query of one head each."""
TILES = {64: (2, 128), 128: (2, 128), 256: (2, 64)}
"""Warpgroups with rows and keys of a tile, by head size; two tiles of keys and two of values are in shared memory."""
BLOCKS = 132
"""At most: what the largest Hopper has processors."""
ROW_BYTES, MOST_SEQUENCES = 32, 1024
"""What a block keeps of each sequence of a step, and how many it has room for."""
PANEL = 64
"""Elements of a vector that a box of a page has."""
PAGE_PART = 16
"""Tokens of the smallest box of a page: a warp asks for a tile's boxes, a lane for each panel of each."""


class WarpgroupPrefill(Attention):
    """Any number of queries a sequence, for one head size."""

    entry = "paged_prefill_wgmma"
    rank = 30

    def __init__(self, head_dim: int, element: DType = DType.BF16) -> None:
        self.head_dim = head_dim
        self.name = f"paged_prefill_wgmma_{head_dim}"
        self.module = "paged_prefill_wgmma" if head_dim == 128 else self.name
        super().__init__(element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = self.common_refusals(need)
        if need.attrs["head_dim"] != self.head_dim:
            reasons.append(f"it is for heads of {self.head_dim}, not {need.attrs['head_dim']}")
        if need.attrs["page_tokens"] % PAGE_PART:
            reasons.append(f"pages of {need.attrs['page_tokens']} tokens are no multiple of {PAGE_PART}")
        if (heads := need.attrs["q_heads"] // need.attrs["kv_heads"]) > ROWS // 2:
            reasons.append(f"{heads} query heads share a key head, and it takes {ROWS // 2}")
        if need.sequences > MOST_SEQUENCES:
            reasons.append(f"{need.sequences} sequences are more than {MOST_SEQUENCES}")
        return reasons

    def scratch_bytes(self, need: OpNeed) -> int:
        """Two places a block for the sums of an item that it shares: per thread its sums, two maxima and two totals, in float32."""
        return 2 * BLOCKS * TILES[self.head_dim][0] * WARPGROUP * (self.head_dim // 2 + 4) * 4

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        groups, keys = TILES[self.head_dim]
        shared = 2 * self.head_dim * (groups * ROWS + 4 * keys) + ROW_BYTES * need.sequences
        blocks = min(context.workers, BLOCKS)
        geometry = Geometry((blocks, 1, 1), ((1 + groups) * WARPGROUP, 1, 1), shared)
        # One counter for items that were drawn, and one for each warpgroup of each block that waits for sums.
        counters = context.keep(bytes(4 + 4 * blocks * groups))
        box, vector = gcd(need.attrs["page_tokens"], keys), 2 * self.head_dim
        vectors = context.operands["cache"].nbytes // need.operands["cache"].shape[0] // vector
        pages = TensorMap(int(layer_address(need, context).value), (vectors, self.head_dim), (box, PANEL), 2)
        own = [tensor_map(pages), i32(box), ptr(context.scratch.address), ptr(counters), ptr(counters + 4)]
        return self.launch(context, geometry, [*self.arguments(need, context), *own])
