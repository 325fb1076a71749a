"""Fused ops around the projections of a layer, with FP8 and NVFP4 weights, for up to 8 tokens."""

from collections.abc import Sequence

from msgspec.structs import replace

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, Buffer, KVLayout, OperandSpec, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, f32, i32, ptr
from atlas_nvidia.implementations.attention import kv_layout, layer_address, other_cache
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    addresses,
    no_vector,
    not_fast,
    other_type,
    ragged,
    shared_limit,
    unbounded,
    vector_type,
)
from atlas_nvidia.implementations.heads import HeadsRopeAppend
from atlas_nvidia.implementations.scaled import COLUMNS, FORMATS, ROWS, THREADS, WARPS, Format, Place, Scaled
from atlas_nvidia.packing import CHUNK, UNIT


class _Normed(Scaled):
    """A norm of the residual stream and products with matrices that all read it, for up to 8 tokens."""

    rank = 50

    def __init__(self, format_: Format, element: DType) -> None:
        self.format = format_
        self.name, self.module = f"{self.op}_scaled{format_.suffix}", f"{self.entry}{format_.suffix}"
        super().__init__(element)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        tokens, width = need.operands["x"].shape
        reasons = [
            *not_fast(need, self.element), *other_type(need, DType.F32, "x"), *no_vector(need, "norm_weight"),
            *unbounded(need, "x"), *self.unread(need),
        ]  # fmt: skip
        if width % CHUNK:
            reasons.append(f"rows of x have {width} elements, which is no multiple of {CHUNK}")
        if tokens > COLUMNS:
            reasons.append(f"it takes at most {COLUMNS} tokens, not {tokens}")
        elif self.shared(need) > shared_limit(need):
            reasons.append(f"{tokens} rows of {width} do not fit into the shared memory of {need.arch}")
        return reasons

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory."""
        tokens, width = need.operands["x"].shape
        return self.format.ring + 2 * tokens * (width + 32) + 4 * width + 4 * WARPS * COLUMNS

    def over(self, tiles: int, need: OpNeed, context: BindContext) -> Geometry:
        """Two blocks a processor where there is room, or one a tile."""
        place = Place.of(need, self.shared(need))
        return Geometry((min(tiles, place.blocks * context.workers), 1, 1), (THREADS, 1, 1), place.shared)


class NormGateUp(_Normed):
    """With SwiGLU; a tile is 8 rows of each matrix."""

    op, entry = "norm_gate_up_silu", "scaled_gate_up"
    matrices = ("gate_weight", "up_weight")

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*super().refusals(need), *other_type(need, self.element, "y"), *ragged(need, "y")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        (tokens, width), rows = need.operands["x"].shape, need.operands["y"].shape[1]
        args = [
            ptr(context.counts), *addresses(context, "x", "norm_weight", *self.matrices, "y"), i32(rows), i32(width), i32(tokens),
            f32(need.attrs["eps"]), vector_type(need, "norm_weight"),
        ]  # fmt: skip
        return self.launch(context, self.over(rows // UNIT, need, context), args)


class NormThenHeads(_Normed):
    """norm_qkv_heads_rope_append in two launches: projections into scratch, 16 rows of one matrix a tile, then a block a token."""

    op, entry = "norm_qkv_heads_rope_append", "scaled_linears"
    matrices = ("q_weight", "k_weight", "v_weight")
    results = ("q_plain", "k_plain", "v")

    def __init__(self, format_: Format, element: DType) -> None:
        super().__init__(format_, element)
        self.heads = HeadsRopeAppend(element)
        self.kernels = [*self.kernels, *self.heads.kernels]

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        rows = {name: need.operands[name].shape[0] for name in self.matrices}
        return [
            *super().refusals(need), *self.heads.refusals(self._apart(need)),
            *(f"{name} has {n} rows, which is no multiple of {ROWS}" for name, n in rows.items() if n % ROWS),
        ]  # fmt: skip

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return self.heads.kv_layouts(need)

    def scratch_bytes(self, need: OpNeed) -> int:
        """Queries, keys and values as projected."""
        return sum(self._sizes(need))

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        place, plain = context.scratch.address, {}
        for name, size in zip(self.results, self._sizes(need), strict=True):
            plain[name] = Buffer(place, size)
            place += size
        tokens, width = need.operands["x"].shape
        rows = [need.operands[name].shape[0] for name in self.matrices]
        args = [
            ptr(context.counts), *addresses(context, "x", "norm_weight", *self.matrices),
            *(ptr(buffer.address) for buffer in plain.values()), *(i32(count) for count in (*rows, width, tokens)),
            f32(need.attrs["eps"]), vector_type(need, "norm_weight"),
        ]  # fmt: skip
        apart = replace(context, operands={**context.operands, **plain})
        return (
            *self.launch(context, self.over(sum(rows) // ROWS, need, context), args),
            *self.heads.bind(self._apart(need), apart),
        )

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


class NormQkv(_Normed):
    """norm_qkv_rope_append: a tile is 8 pairs of dimensions that rotate together, so heads must be rotated whole."""

    op, entry = "norm_qkv_rope_append", "scaled_qkv"
    matrices = ("q_weight", "k_weight", "v_weight")

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        half, head_dim = need.operands["inv_freq"].shape[0], need.attrs["head_dim"]
        reasons = [*super().refusals(need), *other_type(need, self.element, "q"), *other_cache(need, self.element)]
        if 2 * half != head_dim or half % UNIT:
            reasons.append(
                f"{2 * half} of {head_dim} dimensions rotate: it rotates whole heads of a multiple of {2 * UNIT}"
            )
        return reasons

    def shared(self, need: OpNeed) -> int:
        """Bytes of shared memory: a place in the pages and the rotations of a head for each token besides."""
        return super().shared(need) + need.operands["x"].shape[0] * (8 + 8 * need.operands["inv_freq"].shape[0])

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs, (tokens, width) = need.attrs, need.operands["x"].shape
        names = ("x", "norm_weight", *self.matrices, "inv_freq", "positions", "token_row", "row_slot", "slots")
        args = [
            ptr(context.counts), *addresses(context, *names), layer_address(need, context), *addresses(context, "q"),
            *(i32(v) for v in (width, attrs["q_heads"], attrs["kv_heads"], attrs["head_dim"], attrs["page_tokens"])),
            i32(attrs["slot_stride"]), i32(attrs["table_offset"]), i32(tokens), f32(attrs["eps"]), f32(attrs["rope_scale"]),
            vector_type(need, "norm_weight"),
        ]  # fmt: skip
        tiles = (attrs["q_heads"] + 2 * attrs["kv_heads"]) * attrs["head_dim"] // ROWS
        return self.launch(context, self.over(tiles, need, context), args)


def normed(formats: Sequence[Format]) -> list[OpImplementation]:
    """All of them, with rings as deep as ``formats`` have them."""
    kinds: tuple[type[_Normed], ...] = (NormGateUp, NormThenHeads, NormQkv)
    return [make(each, element) for element in ELEMENTS for each in formats for make in kinds]


ALL: tuple[OpImplementation, ...] = tuple(normed(FORMATS))
