"""Products of up to 64 tokens with tiles that the copy engine brings (skinny.cuh)."""

from collections.abc import Sequence

from msgspec.structs import replace

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, Buffer, KVLayout, OperandSpec, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, TensorMap, f32, i32, ptr, tensor_map
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
from atlas_nvidia.implementations.heads import HeadsRopeAppend
from atlas_plugin_hopper.behind_norm import BehindNorm
from atlas_plugin_hopper.tiles import DEPTH, TOKENS, Normed, Product

PAIRS = 16
"""Of dimensions that rotate together, in one group of rows of skinny_qkv."""
LINEAR_ROWS, GATE_UP_ROWS, QKV_ROWS, LINEARS_ROWS = (64, 128), (64, 128, 192, 224), (64, 96), (64, 96, 128)
"""SKINNY_ROWS of the instances: weight rows of a tile."""
_MATRICES = 4
"""Of skinny_linears."""


class Skinny(Implementation):
    """A product of up to 64 tokens; ``matrices`` are the weights."""

    module = entry = ""
    matrices: tuple[str, ...]

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        tokens = need.operands["x"].shape[0]
        rows = {name: need.operands[name].shape[0] for name in self.matrices}
        reasons = [
            *not_fast(need, self.element), *ragged(need, "x"), *unbounded(need, "x"),
            *(reason for name in self.matrices for reason in not_stored(need, name, self.element.value)),
            *(f"{name} has {n} rows, which is no multiple of {VECTOR}" for name, n in rows.items() if n % VECTOR),
        ]  # fmt: skip
        if tokens > TOKENS:
            reasons.append(f"it takes at most {TOKENS} tokens, not {tokens}")
        return reasons


def _tokens(address: int, shape: tuple[int, int]) -> Arg:
    return tensor_map(TensorMap(address, shape, (TOKENS, DEPTH), 2))


def _matrix(need: OpNeed, context: BindContext, name: str, box_rows: int) -> Arg:
    shape = need.operands[name].shape
    return tensor_map(TensorMap(context.operands[name].address, shape, (box_rows, DEPTH), 2))


def linear(product: Product, need: OpNeed, context: BindContext, norm: Normed | None = None) -> Launch:
    """x · weightᵀ into y, on top of ``residual`` where there is one; and what a norm behind it makes of that."""
    tokens, (rows, width) = need.operands["x"].shape[0], need.operands["weight"].shape
    tiles = product.tiling(context.workers, rows)
    geometry, stages = product.plan(tiles, width, context.workers)
    residual = ptr(context.operands["residual"].address) if "residual" in need.operands else ptr(0)
    behind = [*addresses(context, "norm_weight"), ptr(norm.address), ptr(norm.squares)] if norm else [ptr(0)] * 3
    args = [
        ptr(context.counts), live_word(need.operands["x"]), _tokens(context.operands["x"].address, (tokens, width)),
        _matrix(need, context, "weight", tiles.rows), residual, *addresses(context, "y"), *behind, i32(rows), i32(width), i32(stages),
        i32(int(need.operands["y"].dtype is DType.F32)), vector_type(need, "norm_weight") if norm else i32(0),
    ]  # fmt: skip
    return product.launch(context, tiles, geometry, args)


def gate_up(product: Product, need: OpNeed, context: BindContext, x: Normed, y: str) -> Launch:
    """SwiGLU of both products into ``y``."""
    tokens, (rows, width) = need.operands["x"].shape[0], need.operands["gate_weight"].shape
    tiles = product.tiling(context.workers, rows)
    geometry, stages = product.plan(tiles, width, context.workers)
    weights = (_matrix(need, context, name, tiles.rows // 2) for name in ("gate_weight", "up_weight"))
    args = [
        ptr(context.counts), _tokens(x.address, (tokens, width)), *weights, ptr(x.squares), *addresses(context, y), i32(rows),
        i32(width), i32(stages), i32(x.parts), f32(need.attrs["eps"]),
    ]  # fmt: skip
    return product.launch(context, tiles, geometry, args)


def qkv(product: Product, need: OpNeed, context: BindContext, x: Normed) -> Launch:
    """Rotated queries into ``q``, rotated keys and values into pages."""
    attrs, dim = need.attrs, need.attrs["head_dim"]
    tokens, width = need.operands["x"].shape[0], need.operands["q_weight"].shape[1]
    tiles = product.tiling(context.workers, (attrs["q_heads"] + 2 * attrs["kv_heads"]) * dim)
    turns = TOKENS // tiles.splits * (tiles.rows // 2 + 1) * 8
    geometry, stages = product.plan(tiles, width, context.workers, own=turns, single=True)
    weights = (
        # Head, half of its dimensions, pair, summed element: a box has both halves of some pairs.
        tensor_map(TensorMap(context.operands[name].address, (heads, 2, dim // 2, width), (1, 2, PAIRS, DEPTH), 2))
        for name, heads in (
            ("q_weight", attrs["q_heads"]),
            ("k_weight", attrs["kv_heads"]),
            ("v_weight", attrs["kv_heads"]),
        )
    )
    names = ("inv_freq", "positions", "token_row", "row_slot", "slots")
    args = [
        ptr(context.counts), _tokens(x.address, (tokens, width)), *weights, ptr(x.squares), *addresses(context, *names),
        layer_address(need, context), *addresses(context, "q"),
        *(i32(v) for v in (width, attrs["q_heads"], attrs["kv_heads"], dim, attrs["page_tokens"])),
        i32(attrs["slot_stride"]), i32(attrs["table_offset"]), i32(stages), i32(x.parts), f32(attrs["rope_scale"]), f32(attrs["eps"]),
    ]  # fmt: skip
    return product.launch(context, tiles, geometry, args)


def unrotated(need: OpNeed) -> list[str]:
    """Why the heads are none that are rotated whole by groups of PAIRS; no reason when they are."""
    half, head_dim = need.operands["inv_freq"].shape[0], need.attrs["head_dim"]
    if 2 * half == head_dim and half % PAIRS == 0:
        return []
    return [f"{2 * half} of {head_dim} dimensions rotate: it rotates whole heads of a multiple of {2 * PAIRS}"]


class Linear(Skinny):
    """Both ops: ``residual`` tells whether a sum with the residual stream follows."""

    matrices = ("weight",)
    rank = 75

    def __init__(self, element: DType, *, residual: bool) -> None:
        self.residual = residual
        self.op = "linear_add" if residual else "linear"
        self.name = f"{self.op}_skinny"
        super().__init__(element)
        self.product = Product("skinny_linear", LINEAR_ROWS, element)
        self.kernels = self.product.kernels

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = [*super().refusals(need), *other_type(need, self.element, "x")]
        if self.residual:
            reasons += other_type(need, DType.F32, "residual", "y")
        elif need.operands["y"].dtype not in (self.element, DType.F32):
            reasons.append(f"y is {need.operands['y'].dtype.value}, neither {self.element.value} nor f32")
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        return (linear(self.product, need, context),)


class _BehindNorm(Skinny, BehindNorm):
    """A norm of the residual stream, then products that all read it: two launches, the normalised tokens lie in scratch."""

    rank = 30

    def __init__(self, element: DType) -> None:
        super().__init__(element)
        self.product = self.products(element)
        self.kernels = [*self.product.kernels, self.norm]

    def products(self, element: DType) -> Product:
        """The kernel of the second launch."""
        raise NotImplementedError

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_type(need, DType.F32, "x"), *no_vector(need, "norm_weight")]


class NormGateUpSilu(_BehindNorm):
    """A tile is as many rows of gate as of up."""

    op, name = "norm_gate_up_silu", "norm_gate_up_skinny"
    matrices = ("gate_weight", "up_weight")

    def products(self, element: DType) -> Product:
        """See _BehindNorm."""
        return Product("skinny_gate_up", GATE_UP_ROWS, element, unit=2)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_type(need, self.element, "y")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        norm, x = self.normalise(need, context)
        return norm, gate_up(self.product, need, context, x, "y")


class NormQkvRopeAppend(_BehindNorm):
    """A tile is groups of 16 pairs of dimensions that rotate together, so heads must be rotated whole."""

    op, name = "norm_qkv_rope_append", "norm_qkv_skinny"
    matrices = ("q_weight", "k_weight", "v_weight")

    def products(self, element: DType) -> Product:
        """See _BehindNorm."""
        return Product("skinny_qkv", QKV_ROWS, element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *super().refusals(need), *other_type(need, self.element, "q"), *other_cache(need, self.element), *unrotated(need),
        ]  # fmt: skip

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        norm, x = self.normalise(need, context)
        return norm, qkv(self.product, need, context, x)


class NormLinears(_BehindNorm):
    """Up to four matrices one after another; a tile is rows of one of them."""

    op, name = "norm_linears", "norm_linears_skinny"
    matrices: tuple[str, ...] = ("weight_0", "weight_1", "weight_2", "weight_3")
    results: tuple[str, ...] = ("y_0", "y_1", "y_2", "y_3")

    def products(self, element: DType) -> Product:
        """See _BehindNorm."""
        return Product("skinny_linears", LINEARS_ROWS, element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_type(need, self.element, *self.results)]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        norm, x = self.normalise(need, context)
        tokens, width = need.operands["x"].shape
        rows = [need.operands[name].shape[0] for name in self.matrices]
        tiles = self.product.tiling(context.workers, *rows)
        geometry, stages = self.product.plan(tiles, width, context.workers)
        missing = _MATRICES - len(rows)  # matrices without rows
        maps = [_matrix(need, context, name, tiles.rows) for name in self.matrices]
        args = [
            ptr(context.counts), live_word(need.operands["x"]), _tokens(x.address, (tokens, width)), *maps, *maps[-1:] * missing,
            *addresses(context, *self.results), *[ptr(0)] * missing, *(i32(count) for count in (*rows, *[0] * missing, width, stages)),
        ]  # fmt: skip
        return norm, self.product.launch(context, tiles, geometry, args)


class NormLinearsHeads(NormLinears):
    """norm_qkv_heads_rope_append in three launches: the norm, projections into scratch, and a launch for the heads."""

    op, name = "norm_qkv_heads_rope_append", "norm_linears_heads_skinny"
    matrices = ("q_weight", "k_weight", "v_weight")
    results = ("q_plain", "k_plain", "v")

    def __init__(self, element: DType) -> None:
        super().__init__(element)
        self.heads = HeadsRopeAppend(element)
        self.kernels = [*self.kernels, *self.heads.kernels]

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(self._apart(need)), *self.heads.refusals(self._apart(need))]

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return self.heads.kv_layouts(need)

    def scratch_bytes(self, need: OpNeed) -> int:
        """The normalised tokens; queries, keys and values as projected."""
        return super().scratch_bytes(need) + sum(self._sizes(need))

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        place = context.scratch.address + super().scratch_bytes(need)
        plain = {}
        for name, size in zip(self.results, self._sizes(need), strict=True):
            plain[name] = Buffer(place, size)
            place += size
        apart = self._apart(need)
        context = replace(context, operands={**context.operands, **plain})
        return *super().bind(apart, context), *self.heads.bind(apart, context)

    def _sizes(self, need: OpNeed) -> list[int]:
        """Bytes of each product."""
        return [2 * need.tokens * need.operands[name].shape[0] for name in self.matrices]

    def _apart(self, need: OpNeed) -> OpNeed:
        """The same with the products as operands."""
        found = {
            result: OperandSpec((need.tokens, need.operands[matrix].shape[0]), self.element, live="T")
            for matrix, result in zip(self.matrices, self.results, strict=True)
        }
        return replace(need, operands={**need.operands, **found})


def skinny() -> list[OpImplementation]:
    """All of them, beside those of every NVIDIA machine."""
    return [
        make
        for element in ELEMENTS
        for make in (
            Linear(element, residual=False), Linear(element, residual=True), NormGateUpSilu(element), NormQkvRopeAppend(element),
            NormLinears(element), NormLinearsHeads(element),
        )
    ]  # fmt: skip
