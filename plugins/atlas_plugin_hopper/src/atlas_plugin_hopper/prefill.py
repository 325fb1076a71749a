"""Attention of many queries a sequence on warpgroup products."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry
from atlas_nvidia.implementations.attention import Attention

WARPGROUP, ROWS = 128, 64
"""Threads of a warpgroup, and its rows: one query of one head each."""
TILES = {64: (3, 128), 128: (2, 128), 256: (2, 64)}
"""Warpgroups with rows and keys of a tile, by head size; two tiles of keys and two of values are in shared memory."""
PAGE_PART = 16
"""A part of a page that one address is computed for."""


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
        if (heads := need.attrs["q_heads"] // need.attrs["kv_heads"]) > ROWS:
            reasons.append(f"{heads} query heads share a key head, and it takes {ROWS}")
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        groups, keys = TILES[self.head_dim]
        kv_heads = need.attrs["kv_heads"]
        queries = groups * ROWS // (need.attrs["q_heads"] // kv_heads)
        # Each sequence may end within a tile: so many tiles cover every division of the tokens.
        tiles = need.tokens // queries + need.sequences
        shared = 2 * self.head_dim * (groups * ROWS + 4 * keys)
        # Heads vary fastest, so that the longest tiles of all heads come first.
        geometry = Geometry((kv_heads, tiles, 1), ((1 + groups) * WARPGROUP, 1, 1), shared)
        return self.launch(context, geometry, self.arguments(need, context))
