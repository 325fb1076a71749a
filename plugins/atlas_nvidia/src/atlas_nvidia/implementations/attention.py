"""Keys and values in pages, and attention over them. Heads lie before tokens, in the type of the activations."""

from collections.abc import Mapping, Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, f32, i32, ptr
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    VECTOR,
    Implementation,
    addresses,
    not_fast,
    other_type,
    shared_limit,
    spread,
)

GROUPS: Mapping[DType, Mapping[int, tuple[int, ...]]] = {
    DType.BF16: {32: (4,), 64: (1, 2, 4, 8), 128: (1, 2, 4, 8), 256: (8,)},
    DType.F16: {32: (4,), 64: (4, 8), 128: (4, 8), 256: (8,)},
}
"""Instances of paged_decode: query heads that a cluster takes at once, by type and head size."""
SHAPED: Mapping[DType, Mapping[int, tuple[int, ...]]] = {DType.BF16: {128: (4, 8)}}
"""Those of them that exist with other rings as well, for more blocks than the machine holds at once and for the fewest."""
KEY_TILE = 16
"""Keys that a warp takes at once; a tile must not cross a page."""
RINGS: Mapping[int, tuple[tuple[int, int], ...]] = {256: ((4, 2), (4, 1))}
"""Warps of a block of paged_decode and the tiles that each keeps in flight, by head size and best first, where not RING."""
RING = (8, 2)
KEYS: Mapping[int, int] = {256: 16}
"""Keys that paged_prefill takes at once, by head size, where not 64: registers hold queries and results besides."""
MANY_RING, FEW_RING = (6, 2), (12, 2)
"""The same of instances named *_many, of which a processor holds two, and *_few, whose blocks leave half of the processors idle."""
MAX_SPLITS = 8
"""Blocks of a cluster that every device with clusters can hold together."""


def kv_layout(need: OpNeed, element: DType) -> KVLayout:
    """The layout of pages of ``element`` with the page size that was asked for."""
    return KVLayout(f"hnd_{element.value}", element, need.attrs["page_tokens"])


def other_cache(need: OpNeed, element: DType) -> list[str]:
    """Refusals of pages laid out otherwise, and of heads that are no whole number of vectors."""
    own = kv_layout(need, element).name
    reasons = [] if need.kv == own else [f"pages are laid out as {need.kv}, not as {own}"]
    if need.attrs["head_dim"] % VECTOR:
        reasons.append(f"head_dim {need.attrs['head_dim']} is no multiple of {VECTOR}")
    return reasons


def layer_address(need: OpNeed, context: BindContext) -> Arg:
    """Where the pages of this node's layer start."""
    cache = context.operands["cache"]
    return ptr(cache.address + need.attrs["layer"] * (cache.nbytes // need.operands["cache"].shape[0]))


class _Cached(Implementation):
    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)


class KvAppend(_Cached):
    """Copies, 16 bytes a thread."""

    op, name = "kv_append", "kv_append"
    module, entry = "rope", "kv_append"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, self.element, "k", "v"), *other_cache(need, self.element),
        ]  # fmt: skip

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs = need.attrs
        args = [
            ptr(context.counts), *addresses(context, "k", "v", "positions", "token_row", "row_slot", "slots"),
            layer_address(need, context), i32(attrs["kv_heads"]), i32(attrs["head_dim"]), i32(attrs["page_tokens"]),
            i32(attrs["slot_stride"]), i32(attrs["table_offset"]),
        ]  # fmt: skip
        return self.launch(context, spread(need.tokens * attrs["kv_heads"] * attrs["head_dim"] // VECTOR), args)


class Attention(_Cached):
    """What all kernels of this op have in common; a subclass says which needs it refuses and how it is launched."""

    op = "paged_attention"

    def common_refusals(self, need: OpNeed) -> list[str]:
        """Refusals of other types and pages."""
        return [
            *not_fast(need, self.element), *other_type(need, self.element, "q", "y"), *other_cache(need, self.element),
        ]  # fmt: skip

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = self.common_refusals(need)
        sizes = tuple(GROUPS[self.element])
        if need.attrs["head_dim"] not in sizes:
            reasons.append(f"head_dim is {need.attrs['head_dim']}, and there are kernels for {sizes}")
        if need.attrs["page_tokens"] % KEY_TILE:
            reasons.append(f"pages of {need.attrs['page_tokens']} tokens are no multiple of {KEY_TILE}")
        return reasons

    def arguments(self, need: OpNeed, context: BindContext) -> list[Arg]:
        """In the order that both kernels share."""
        attrs = need.attrs
        return [
            ptr(context.counts), *addresses(context, "q", "cu_q", "row_slot", "slots"), layer_address(need, context),
            *addresses(context, "y"), i32(attrs["q_heads"]), i32(attrs["kv_heads"]), i32(attrs["page_tokens"]),
            i32(attrs["slot_stride"]), i32(attrs["table_offset"]), i32(attrs["window"]), f32(attrs["scale"]),
        ]  # fmt: skip


class Decode(Attention):
    """One query a sequence, for one head size and up to ``group`` query heads a cluster.

    The smallest group that takes all query heads of a key head ranks highest; the others would idle or read keys twice.
    """

    entry = "paged_decode"

    def __init__(
        self, head_dim: int, group: int, element: DType = DType.BF16, ring: tuple[int, int] | None = None
    ) -> None:
        self.head_dim, self.group = head_dim, group
        rings = RINGS.get(head_dim, (RING,))
        self.warps, self.stages = ring or rings[0]
        self._order = rings.index((self.warps, self.stages))
        self.name = f"paged_decode_{head_dim}_{group}" + (f"_{self.stages}" if self._order else "")
        self.module = "paged_decode" if (head_dim, group) == (128, 4) else self.name
        super().__init__(element)
        if group in SHAPED.get(element, {}).get(head_dim, ()):
            self.kernels = tuple(
                (module, self.entry) for module in (self.module, f"{self.name}_many", f"{self.name}_few")
            )

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The rank depends on the number of query heads a key head."""
        reasons = self.refusals(need)
        if reasons:
            return Verdict.no(*reasons)
        groups = GROUPS[self.element][self.head_dim]
        best = best_group(need.attrs["q_heads"] // need.attrs["kv_heads"], groups) == self.group
        return Verdict.yes((40 if best else 20 + groups.index(self.group)) - self._order)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = super().refusals(need)
        if need.attrs["head_dim"] != self.head_dim:
            reasons.append(f"it is for heads of {self.head_dim}, not {need.attrs['head_dim']}")
        if need.max_query != 1:
            reasons.append(f"sequences bring up to {need.max_query} tokens, and it takes one")
        if self._shared(self.warps, self.stages) > shared_limit(need):
            reasons.append(
                f"it needs {self._shared(self.warps, self.stages)} bytes of shared memory, and {need.arch} has {shared_limit(need)}"
            )
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        kv_heads = need.attrs["kv_heads"]
        tiles = kv_heads * -(-(need.attrs["q_heads"] // kv_heads) // self.group)
        splits = 1
        while splits < MAX_SPLITS and tiles * need.sequences * splits * 2 <= context.workers:
            splits *= 2
        # Blocks that do not all fit at once follow each other better when a processor holds two; a block of the largest
        # clusters has to read twice its share.
        shape, (warps, stages) = 0, (self.warps, self.stages)
        if len(self.kernels) > 1 and tiles * need.sequences >= 2 * context.workers:
            shape, (warps, stages) = 1, MANY_RING
        elif len(self.kernels) > 1 and splits == MAX_SPLITS and self._shared(*FEW_RING) <= shared_limit(need):
            shape, (warps, stages) = 2, FEW_RING
        geometry = Geometry((splits, tiles, need.sequences), (warps * 32, 1, 1), self._shared(warps, stages))
        kernel = context.backend.kernel(*self.kernels[shape])
        attrs = LaunchAttrs(overlap=True, cluster=(splits, 1, 1))
        return (context.backend.prepare_launch(kernel, geometry, self.arguments(need, context), attrs),)

    def _shared(self, warps: int, stages: int) -> int:
        """Bytes of the kernel's struct Shared: stages of keys and values (later sums of warps), queries, sums of blocks."""
        dim, group = self.head_dim, self.group
        ring = max(warps * stages * 2 * KEY_TILE * dim * 2, 4 * warps * group * dim)
        return ring + 4 * (4 * dim + 2 * warps * 8 + 16 * MAX_SPLITS + group * dim)


def best_group(heads: int, groups: Sequence[int]) -> int:
    """Query heads that a cluster takes at once, of ``heads`` that share a key head; ``groups`` ascend."""
    return next((group for group in groups if group >= heads), groups[-1])


class Prefill(Attention):
    """Any number of queries a sequence, for one head size."""

    entry = "paged_prefill"
    rank = 10
    queries = 64

    def __init__(self, head_dim: int, element: DType = DType.BF16) -> None:
        self.head_dim, self.keys = head_dim, KEYS.get(head_dim, 64)
        self.name = f"paged_prefill_{head_dim}"
        self.module = "paged_prefill" if head_dim == 128 else self.name
        super().__init__(element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = super().refusals(need)
        if need.attrs["head_dim"] != self.head_dim:
            reasons.append(f"it is for heads of {self.head_dim}, not {need.attrs['head_dim']}")
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        # Each sequence may end within a tile: so many tiles cover every division of the tokens.
        tiles = need.tokens // self.queries + need.sequences
        shared = 2 * 2 * self.keys * self.head_dim * 2
        geometry = Geometry((tiles, need.attrs["q_heads"], 1), (128, 1, 1), shared)
        return self.launch(context, geometry, self.arguments(need, context))


def _of(element: DType) -> list[OpImplementation]:
    decode: list[OpImplementation] = [
        Decode(dim, group, element, ring)
        for dim, groups in GROUPS[element].items()
        for group in groups
        for ring in RINGS.get(dim, (RING,))
    ]
    return [KvAppend(element), *decode, *(Prefill(dim, element) for dim in GROUPS[element])]


ALL: tuple[OpImplementation, ...] = tuple(each for element in ELEMENTS for each in _of(element))
