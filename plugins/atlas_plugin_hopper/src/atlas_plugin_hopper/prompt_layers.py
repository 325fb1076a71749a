"""What begins with a norm in a layer of a prompt, in two launches: the norm, and one product of all matrices behind it.

The same behind a projection into the residual stream is two launches as well: the projection does the norm's part (prompt_chains).
"""

from collections.abc import Mapping, Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import f32, i32, ptr
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.attention import kv_layout, layer_address, other_cache
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    VECTOR,
    addresses,
    no_vector,
    not_fast,
    not_stored,
    other_type,
    ragged,
    unbounded,
    vector_type,
)
from atlas_plugin_hopper.behind_norm import BehindNorm
from atlas_plugin_hopper.prompts import WIDE, Tiles, launched, tokens_map, weight_map
from atlas_plugin_hopper.tiles import Normed

TALL, SLIM = Tiles(192, 224, 4, 1.0), Tiles(128, 224, 4, 1.0)
WHOLE = Tiles(320, 112, 4, 1.05, same_tokens=True, box=56, each=2)
GATE_UP: Mapping[Tiles, str] = {
    WIDE: "gate_up_tma",
    TALL: "gate_up_tma_192",
    SLIM: "gate_up_tma_224",
    WHOLE: "gate_up_tma_320",
}
"""Modules of gate_up_tma.cu."""
HEADS, NARROW_HEADS = Tiles(128, 256, 4, 1.0, ending=5), Tiles(128, 128, 6, 1.05, ending=5)
TALL_HEADS = Tiles(192, 128, 5, 1.05, ending=5)
STAGED_HEADS = Tiles(128, 256, 3, 1.0, ending=2, once=20, staged=True)
"""Whole heads; the last are ended beside the next tile's products, which pays for very many tokens."""
QKV: Mapping[int, Mapping[Tiles, str]] = {
    128: {HEADS: "qkv_tma", TALL_HEADS: "qkv_tma_192", NARROW_HEADS: "qkv_tma_128", STAGED_HEADS: "qkv_staged"},
    64: {HEADS: "qkv_tma_64"},
}
"""Modules of qkv_tma.cu and qkv_staged.cu by head size: a tile is whole heads."""
PAIRS = Tiles(192, 96, 6, 1.3, ending=5, box=16)
UNNORMED: Mapping[int, Mapping[Tiles, str]] = {128: {**QKV[128], PAIRS: "qkv_pairs"}, 64: QKV[64]}
"""The same where heads have no norm, which need not be whole then: qkv_pairs.cu."""


def gate_up(tiles: Tiles, module: str, need: OpNeed, context: BindContext, x: Normed, y: str) -> Launch:
    """SwiGLU of both products into ``y``."""
    tokens, (rows, width) = need.operands[y].shape[0], need.operands["gate_weight"].shape
    args = [
        ptr(context.counts), tokens_map(x.address, tokens, width, tiles),
        *(weight_map(need, context, name, tiles) for name in ("gate_weight", "up_weight")), ptr(x.squares),
        *addresses(context, y), i32(rows), i32(width), i32(x.parts), f32(need.attrs["eps"]),
    ]  # fmt: skip
    return launched(context, (module, "gate_up_tma"), tiles, tokens, -(-rows // tiles.share), args)


def qkv(
    tiles: Tiles, module: str, need: OpNeed, context: BindContext, x: Normed, vectors: Sequence[str] = (), eps: str = "eps"
) -> Launch:  # fmt: skip
    """Rotated queries into ``q``, rotated keys and values into pages. ``vectors`` are the weights of norms of heads, which have ``eps``."""
    tokens, attrs, each = need.operands["q"].shape[0], need.attrs, tiles.rows // need.attrs["head_dim"]
    q_heads, kv_heads, width = attrs["q_heads"], attrs["kv_heads"], need.operands["q_weight"].shape[1]
    if tiles.box:
        columns = -(-(q_heads + 2 * kv_heads) * attrs["head_dim"] // tiles.rows)
    else:
        columns = -(-q_heads // each) + 2 * -(-kv_heads // each)
    norms = addresses(context, *vectors) or [ptr(0), ptr(0)]
    types = [vector_type(need, name) for name in vectors] or [i32(0), i32(0)]
    args = [
        ptr(context.counts), tokens_map(x.address, tokens, width, tiles),
        *(weight_map(need, context, name, tiles) for name in ("q_weight", "k_weight", "v_weight")), *norms, ptr(x.squares),
        *addresses(context, "inv_freq", "positions", "token_row", "row_slot", "slots"), layer_address(need, context),
        *addresses(context, "q"), i32(width), i32(q_heads), i32(kv_heads), i32(attrs["page_tokens"]), i32(attrs["slot_stride"]),
        i32(attrs["table_offset"]), *types, i32(x.parts), f32(attrs["rope_scale"]), f32(attrs["eps"]), f32(attrs[eps]),
    ]  # fmt: skip
    return launched(context, (module, entry_of(module)), tiles, tokens, columns, args)


def entry_of(module: str) -> str:
    """Of a module of GATE_UP, QKV or UNNORMED: modules are named after it."""
    return next(entry for entry in ("gate_up_tma", "qkv_tma", "qkv_staged", "qkv_pairs") if module.startswith(entry))


def unrotated(need: OpNeed, dim: int) -> list[str]:
    """Why the heads are none of ``dim`` that are rotated whole; no reason when they are."""
    half, head_dim = need.operands["inv_freq"].shape[0], need.attrs["head_dim"]
    if head_dim == 2 * half == dim:
        return []
    return [f"{2 * half} of {head_dim} dimensions rotate: it rotates whole heads of {dim}"]


class _BehindNorm(BehindNorm):
    """The normalised tokens lie in scratch. ``matrices`` are the weights of the product, whose first two are the shares of a tile.

    ``tiles`` is one of ``instances``; it ranks higher where it takes the least time of them.
    """

    matrices: tuple[str, ...]
    instances: Mapping[Tiles, str]

    def __init__(self, tiles: Tiles, element: DType) -> None:
        self.tiles = tiles
        self.module = self.instances[tiles]
        if tiles not in (WIDE, HEADS):
            self.name = f"{self.name}_{self.module.split('_')[-1] if tiles in (PAIRS, STAGED_HEADS) else tiles.tokens}"
        super().__init__(element)
        self.kernels = (self.norm, (self.module, self.entry))

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
        norm, x = self.normalise(need, context)
        return norm, gate_up(self.tiles, self.module, need, context, x, "y")


class NormQkvRopeAppend(_BehindNorm):
    """Heads are rotated whole; ``vectors`` are the weights of their norms."""

    op = "norm_qkv_rope_append"
    matrices = ("q_weight", "k_weight", "v_weight")
    sized: Mapping[int, Mapping[Tiles, str]] = UNNORMED
    vectors: tuple[str, ...] = ()
    eps = "eps"

    def __init__(self, head_dim: int, tiles: Tiles, element: DType) -> None:
        self.head_dim = head_dim
        self.name = f"{self.op}_tma_{head_dim}"
        self.instances = self.sized[head_dim]
        self.entry = entry_of(self.instances[tiles])
        super().__init__(tiles, element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *super().refusals(need), *other_type(need, self.element, "q"), *other_cache(need, self.element),
            *(reason for name in self.vectors for reason in no_vector(need, name)), *unrotated(need, self.head_dim),
        ]  # fmt: skip

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        norm, x = self.normalise(need, context)
        return norm, qkv(self.tiles, self.module, need, context, x, self.vectors, self.eps)


class NormQkvHeadsRopeAppend(NormQkvRopeAppend):
    """With norms of the heads, which a tile has whole."""

    op = "norm_qkv_heads_rope_append"
    sized = QKV
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
            for dim, instances in make.sized.items()
            for tiles in instances
        ]
    return made
