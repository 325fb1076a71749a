"""What begins with a norm in a layer of a prompt, in two launches: the norm, and one product of all matrices behind it."""

from collections.abc import Mapping, Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, f32, i32, ptr
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.attention import kv_layout, layer_address, other_cache
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    VECTOR,
    Implementation,
    addresses,
    live_word,
    no_vector,
    not_fast,
    not_stored,
    other_type,
    ragged,
    unbounded,
    vector_type,
)
from atlas_plugin_hopper.prompts import NARROW, PEERS, WIDE, Tiles, tokens_map, weight_map

TALL, TALL_HEADS, SLIM = Tiles(192, 224, 4, 1.0), Tiles(192, 128, 5, 1.05), Tiles(128, 224, 4, 1.0)
GATE_UP: Mapping[Tiles, str] = {WIDE: "gate_up_tma", TALL: "gate_up_tma_192", SLIM: "gate_up_tma_224"}
"""Modules of gate_up_tma.cu."""
QKV: Mapping[int, Mapping[Tiles, str]] = {
    128: {WIDE: "qkv_tma", TALL_HEADS: "qkv_tma_192", NARROW: "qkv_tma_128"},
    64: {WIDE: "qkv_tma_64"},
}
"""Modules of qkv_tma.cu by head size: a tile is whole heads."""


class _BehindNorm(Implementation):
    """The normalised tokens lie in scratch. ``matrices`` are the weights of the product, whose first two are the shares of a tile.

    ``tiles`` is one of ``instances``; it ranks higher where it takes the least time of them.
    """

    matrices: tuple[str, ...]
    instances: Mapping[Tiles, str]

    def __init__(self, tiles: Tiles, element: DType) -> None:
        self.tiles = tiles
        self.module = self.instances[tiles]
        if tiles is not WIDE:
            self.name = f"{self.name}_{tiles.tokens}"
        super().__init__(element)
        self.norm = "rms_norm" if element is DType.BF16 else f"rms_norm_{element.value}"
        self.kernels = ((self.norm, "rms_norm"), (self.module, self.entry))

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation."""
        verdict = super().supports(need)
        if not verdict.ok:
            return verdict
        tokens, width = need.operands["x"].shape
        rows = sum(need.operands[name].shape[0] for name in self.matrices)
        order = sorted(self.instances, key=lambda tiles: tiles.time(tokens, rows, width)).index(self.tiles)
        return Verdict.yes(20 - order)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        rows = {name: need.operands[name].shape[0] for name in self.matrices}
        return [
            *not_fast(need, self.element), *other_type(need, DType.F32, "x"), *ragged(need, "x"), *unbounded(need, "x"),
            *no_vector(need, "norm_weight"),
            *(reason for name in self.matrices for reason in not_stored(need, name, self.element.value)),
            *(f"{name} has {n} rows, which is no multiple of {VECTOR}" for name, n in rows.items() if n % VECTOR),
        ]  # fmt: skip

    def scratch_bytes(self, need: OpNeed) -> int:
        """The normalised tokens."""
        tokens, width = need.operands["x"].shape
        return 2 * tokens * width

    def launches(self, need: OpNeed, context: BindContext, columns: int, args: Sequence[Arg]) -> Sequence[Launch]:
        """The norm, then the product of ``columns`` tiles of rows; ``args`` are its own, behind counts, tokens and matrices."""
        tokens, width = need.operands["x"].shape
        norm = [
            ptr(context.counts), live_word(need.operands["x"]), *addresses(context, "x", "norm_weight"),
            ptr(context.scratch.address), i32(width), f32(need.attrs["eps"]), vector_type(need, "norm_weight"),
        ]  # fmt: skip
        every = [
            ptr(context.counts), tokens_map(context.scratch.address, tokens, width, self.tiles),
            *(weight_map(need, context, name, self.tiles) for name in self.matrices), *args,
        ]  # fmt: skip
        made = (
            (self.kernels[0], Geometry((tokens, 1, 1), (256, 1, 1)), norm, LaunchAttrs(overlap=True)),
            (
                self.kernels[1], self.tiles.geometry(tokens, columns, context.workers), every,
                LaunchAttrs(overlap=True, cluster=(PEERS, 1, 1)),
            ),
        )  # fmt: skip
        return [
            context.backend.prepare_launch(context.backend.kernel(*kernel), geometry, given, attrs)
            for kernel, geometry, given, attrs in made
        ]


class NormGateUpSilu(_BehindNorm):
    """A tile is as many rows of gate as of up."""

    op, name = "norm_gate_up_silu", "norm_gate_up_tma"
    entry = "gate_up_tma"
    matrices = ("gate_weight", "up_weight")
    instances = GATE_UP

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_type(need, self.element, "y")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, width = need.operands["gate_weight"].shape
        columns = -(-rows // self.tiles.share)
        return self.launches(need, context, columns, [*addresses(context, "y"), i32(rows), i32(width)])


class NormQkvRopeAppend(_BehindNorm):
    """Heads are rotated whole; ``vectors`` are the weights of their norms."""

    op = "norm_qkv_rope_append"
    entry = "qkv_tma"
    matrices = ("q_weight", "k_weight", "v_weight")
    vectors: tuple[str, ...] = ()
    eps = "eps"

    def __init__(self, head_dim: int, tiles: Tiles, element: DType) -> None:
        self.head_dim = head_dim
        self.name = f"{self.op}_tma_{head_dim}"
        self.instances = QKV[head_dim]
        super().__init__(tiles, element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        half, head_dim = need.operands["inv_freq"].shape[0], need.attrs["head_dim"]
        reasons = [
            *super().refusals(need), *other_type(need, self.element, "q"), *other_cache(need, self.element),
            *(reason for name in self.vectors for reason in no_vector(need, name)),
        ]  # fmt: skip
        if head_dim != self.head_dim or 2 * half != head_dim:
            reasons.append(f"{2 * half} of {head_dim} dimensions rotate: it rotates whole heads of {self.head_dim}")
        return reasons

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs, each = need.attrs, self.tiles.rows // self.head_dim
        q_heads, kv_heads = attrs["q_heads"], attrs["kv_heads"]
        norms = addresses(context, *self.vectors) or [ptr(0), ptr(0)]
        types = [vector_type(need, name) for name in self.vectors] or [i32(0), i32(0)]
        args = [
            *norms, *addresses(context, "inv_freq", "positions", "token_row", "row_slot", "slots"),
            layer_address(need, context), *addresses(context, "q"), i32(need.operands["x"].shape[1]), i32(q_heads), i32(kv_heads),
            i32(attrs["page_tokens"]), i32(attrs["slot_stride"]), i32(attrs["table_offset"]), *types, f32(attrs["rope_scale"]),
            f32(attrs[self.eps]),
        ]  # fmt: skip
        return self.launches(need, context, -(-q_heads // each) + 2 * -(-kv_heads // each), args)


class NormQkvHeadsRopeAppend(NormQkvRopeAppend):
    """With norms of the heads, which a tile has whole."""

    op = "norm_qkv_heads_rope_append"
    vectors = ("q_norm", "k_norm")
    eps = "head_eps"


def layers() -> list[OpImplementation]:
    """All of them."""
    made: list[OpImplementation] = []
    for element in ELEMENTS:
        made += [NormGateUpSilu(tiles, element) for tiles in GATE_UP]
        made += [
            make(dim, tiles, element)
            for make in (NormQkvRopeAppend, NormQkvHeadsRopeAppend)
            for dim, instances in QKV.items()
            for tiles in instances
        ]
    return made
