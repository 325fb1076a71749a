"""Fused ops around the projections of a layer, for up to 8 tokens: with attention and two more a dense layer is five launches."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, f32, i32, ptr
from atlas_nvidia.implementations.attention import kv_layout, layer_address, other_cache
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    Implementation,
    addresses,
    no_vector,
    not_fast,
    not_stored,
    other_type,
    ragged,
    shared_limit,
    unbounded,
    vector_type,
)
from atlas_nvidia.implementations.linear import DEPTH, ROWS, SHORT, THREADS, streaming_bytes, too_large

COLUMNS = 8
MAX_CLUSTER = 8
"""Blocks of a cluster that every device can hold together."""
MOST_TILES = 4
"""Tiles of a head that a block keeps until the head is complete (norm_qkv.cu)."""


def norm_bytes(width: int, capacity: int, depth: int = DEPTH) -> int:
    """Shared memory of a streaming kernel that normalises ``capacity`` columns of ``width`` first (gemv.cuh)."""
    stride = -(-width // 64) * 64 + 32
    return streaming_bytes(COLUMNS, depth) + 2 * capacity * stride + 4 * width + 4 * 8 * COLUMNS


class _Normed(Implementation):
    """A norm of the residual stream and products with matrices that all read it; ``short`` is for small ones."""

    matrices: tuple[str, ...]
    rank = 50

    def __init__(self, element: DType, *, short: bool = False) -> None:
        self.short = short
        if short:
            self.name, self.module, self.rank = f"{self.name}_short", f"{self.module}_short", self.rank + 1
        super().__init__(element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        tokens, width = need.operands["x"].shape
        reasons = [
            *not_fast(need, self.element), *other_type(need, DType.F32, "x"), *no_vector(need, "norm_weight"),
            *ragged(need, "x"), *unbounded(need, "x"),
            *(reason for name in self.matrices for reason in not_stored(need, name, self.element.value)),
        ]  # fmt: skip
        if self.short:
            reasons += [reason for name in self.matrices for reason in too_large(need.operands[name].shape)]
        if tokens > COLUMNS:
            reasons.append(f"it takes at most {COLUMNS} tokens, not {tokens}")
        elif self.shared(need) > shared_limit(need):
            reasons.append(f"{tokens} rows of {width} do not fit into the shared memory of {need.arch}")
        return reasons

    def geometry(self, need: OpNeed, context: BindContext, tiles: int) -> Geometry:
        """One block a processor, or one a tile."""
        return Geometry(
            (tiles if self.short else min(tiles, context.workers), 1, 1), (THREADS, 1, 1), self.shared(need)
        )

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        tokens, width = need.operands["x"].shape
        return norm_bytes(width, tokens, SHORT if self.short else DEPTH)


class NormQkvRopeAppend(_Normed):
    """A tile is 8 pairs of dimensions that rotate together, so heads must be rotated whole."""

    op, name = "norm_qkv_rope_append", "norm_qkv_rope_append"
    module, entry = "norm_qkv", "norm_qkv_rope_append"
    matrices = ("q_weight", "k_weight", "v_weight")
    vectors: tuple[str, ...] = ()
    """Vectors of weights besides the norm's."""
    epsilons: tuple[str, ...] = ("eps",)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = [
            *super().refusals(need), *other_type(need, self.element, "q"), *other_cache(need, self.element),
            *(reason for name in self.vectors for reason in no_vector(need, name)),
        ]  # fmt: skip
        half, head_dim = need.operands["inv_freq"].shape[0], need.attrs["head_dim"]
        if 2 * half != head_dim or half % 8:
            reasons.append(f"{2 * half} of {head_dim} dimensions rotate: it rotates whole heads of a multiple of 16")
        return reasons

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory: a place in the pages and the rotations of a head for each token besides."""
        return super().shared(need) + need.operands["x"].shape[0] * (8 + 8 * need.operands["inv_freq"].shape[0])

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def cluster(self, need: OpNeed) -> int:
        """Blocks that work on one head together."""
        return 1

    def grid(self, need: OpNeed, context: BindContext) -> int:
        """One block a processor, or one a tile."""
        heads = need.attrs["q_heads"] + 2 * need.attrs["kv_heads"]
        return min(int(heads * need.attrs["head_dim"] // ROWS), context.workers)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs, cluster = need.attrs, self.cluster(need)
        tokens, width = need.operands["x"].shape
        names = (
            "x", "norm_weight", *self.matrices, *self.vectors, "inv_freq", "positions", "token_row", "row_slot", "slots",
        )  # fmt: skip
        args = [
            ptr(context.counts), *addresses(context, *names), layer_address(need, context), *addresses(context, "q"),
            *(i32(v) for v in (width, attrs["q_heads"], attrs["kv_heads"], attrs["head_dim"], attrs["page_tokens"])),
            i32(attrs["slot_stride"]), i32(attrs["table_offset"]), i32(tokens), *(f32(attrs[name]) for name in self.epsilons),
            f32(attrs["rope_scale"]), *(vector_type(need, name) for name in ("norm_weight", *self.vectors)),
        ]  # fmt: skip
        geometry = Geometry((self.grid(need, context), 1, 1), (THREADS, 1, 1), self.shared(need))
        return self.launch(context, geometry, args, cluster=(cluster, 1, 1) if cluster > 1 else None)


class NormQkvBiasRopeAppend(NormQkvRopeAppend):
    """With biases of the projections."""

    op = name = entry = "norm_qkv_bias_rope_append"
    vectors = ("q_bias", "k_bias", "v_bias")


class NormQkvHeadsRopeAppend(NormQkvRopeAppend):
    """With norms of the heads, each of which is the work of one cluster."""

    op = name = entry = "norm_qkv_heads_rope_append"
    vectors = ("q_norm", "k_norm")
    epsilons = ("eps", "head_eps")
    blocks = 4
    """Of a cluster, or as many as a head has tiles: the fewer, the more clusters find room."""

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        tiles, reasons = self.tiles(need), super().refusals(need)
        if need.attrs["head_dim"] % ROWS or tiles % self.cluster(need) or tiles > MOST_TILES * self.cluster(need):
            reasons.append(
                f"the {tiles} tiles of a head cannot be shared out to clusters of {self.cluster(need)} blocks"
            )
        return reasons

    @staticmethod
    def tiles(need: OpNeed) -> int:
        """Of a head."""
        return int(need.attrs["head_dim"]) // ROWS

    def cluster(self, need: OpNeed) -> int:
        """See NormQkvRopeAppend."""
        return min(self.blocks, self.tiles(need))

    def grid(self, need: OpNeed, context: BindContext) -> int:
        """Clusters that have equally many heads, or nearly so."""
        heads, cluster = int(need.attrs["q_heads"] + 2 * need.attrs["kv_heads"]), self.cluster(need)
        rounds = -(-heads // max(1, context.workers // cluster))
        return -(-heads // rounds) * cluster


class NormGateUpSilu(_Normed):
    """A tile is 8 rows of gate and the same of up."""

    op, name = "norm_gate_up_silu", "norm_gate_up_silu"
    module, entry = "norm_gate_up", "norm_gate_up_silu"
    matrices = ("gate_weight", "up_weight")

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_type(need, self.element, "y"), *ragged(need, "y")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, width = need.operands["x"].shape
        rows = need.operands["y"].shape[1]
        args = [
            ptr(context.counts), *addresses(context, "x", "norm_weight", "gate_weight", "up_weight", "y"), i32(rows), i32(width),
            i32(tokens), f32(need.attrs["eps"]), vector_type(need, "norm_weight"),
        ]  # fmt: skip
        return self.launch(context, self.geometry(need, context, rows // 8), args)


class NormLinears(_Normed):
    """Four matrices one after another; a tile is 16 rows."""

    op, name = "norm_linears", "norm_linears"
    module, entry = "norm_linears", "norm_linears"
    matrices = ("weight_0", "weight_1", "weight_2", "weight_3")
    _results = ("y_0", "y_1", "y_2", "y_3")

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = [*super().refusals(need), *other_type(need, self.element, *self._results)]
        return reasons + [
            f"{name} has {need.operands[name].shape[0]} rows, which is no multiple of {ROWS}"
            for name in self.matrices
            if need.operands[name].shape[0] % ROWS
        ]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, width = need.operands["x"].shape
        rows = [need.operands[name].shape[0] for name in self.matrices]
        args = [
            ptr(context.counts), *addresses(context, "x", "norm_weight", *self.matrices, *self._results),
            *(i32(count) for count in (*rows, width, tokens)), f32(need.attrs["eps"]), vector_type(need, "norm_weight"),
        ]  # fmt: skip
        return self.launch(context, self.geometry(need, context, sum(rows) // ROWS), args)


_ANY: tuple[type[_Normed], ...] = (
    NormQkvRopeAppend, NormQkvBiasRopeAppend, NormQkvHeadsRopeAppend, NormGateUpSilu, NormLinears,
)  # fmt: skip
_SHORT: tuple[type[_Normed], ...] = (NormQkvRopeAppend, NormGateUpSilu)
ALL: tuple[OpImplementation, ...] = tuple(
    make(element, short=short)
    for element in ELEMENTS
    for short, made in ((False, _ANY), (True, _SHORT))
    for make in made
)
