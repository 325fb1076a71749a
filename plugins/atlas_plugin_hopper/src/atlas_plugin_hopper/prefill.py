"""Attention of many queries a sequence on warpgroup products."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, i32, ptr
from atlas_nvidia.implementations.attention import Attention

WARPGROUP, ROWS = 128, 64
"""Threads of a warpgroup, and its rows: one query of one head each."""
TILES = {64: (3, 128), 128: (2, 128), 256: (2, 64)}
"""Warpgroups with rows and keys of a tile, by head size; two tiles of keys and two of values are in shared memory."""
PARTS, SHARED = 3, 264
"""Blocks that share out the keys of a tile of queries, and all blocks that do, at most: two for each of 132 processors."""
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

    def scratch_bytes(self, need: OpNeed) -> int:
        """Of each block that shares a tile: its sums, two maxima and two totals of every thread, in float32."""
        threads = TILES[self.head_dim][0] * WARPGROUP
        return self._places(need) * int(need.attrs["kv_heads"]) * threads * (self.head_dim // 2 + 4) * 4

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        groups, keys = TILES[self.head_dim]
        kv_heads, places = need.attrs["kv_heads"], self._places(need)
        shared = 2 * self.head_dim * (groups * ROWS + 4 * keys)
        items = kv_heads * (self._tiles(need) + places * (PARTS - 1) // PARTS)
        geometry = Geometry((min(items, context.workers), 1, 1), ((1 + groups) * WARPGROUP, 1, 1), shared)
        # One for what has been begun, and one for the parts of each tile that have been summed up.
        counters = context.keep(bytes(4 + 4 * places * kv_heads * groups))
        own = [
            ptr(context.scratch.address), ptr(counters), ptr(counters + 4), i32(places), i32(context.workers),
        ]  # fmt: skip
        return self.launch(context, geometry, [*self.arguments(need, context), *own])

    def _tiles(self, need: OpNeed) -> int:
        """Tiles of queries of a key head: each sequence may end within one, and so many cover every division of the tokens."""
        queries = TILES[self.head_dim][0] * ROWS // (need.attrs["q_heads"] // need.attrs["kv_heads"])
        return int(need.tokens // queries + need.sequences)

    def _places(self, need: OpNeed) -> int:
        """Blocks of a key head that share tiles, at most."""
        return min(SHARED // int(need.attrs["kv_heads"]), PARTS * self._tiles(need))
