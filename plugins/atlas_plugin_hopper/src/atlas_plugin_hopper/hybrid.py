"""Layers of linear attention and a mixture of experts in one launch for one token, and what follows full attention in its layer."""

import struct
from collections.abc import Sequence
from itertools import accumulate

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, FusedCall, FusedOp, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, f32, i32, ptr
from atlas_nvidia.fused import LINEAR_ADD, LINEAR_ATTENTION_STEP, MOE_SHARED_ADD, NORM_LINEARS, NORM_ROUTE
from atlas_nvidia.implementations.base import (
    WARP,
    Implementation,
    addresses,
    not_fast,
    not_stored,
    other_type,
    vector_type,
)
from atlas_nvidia.implementations.linear_attention import WIDTH

HIDDEN, SIZE, TOP_K, MOST_EXPERTS = 2048, 512, 8, 256
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
"""Sizes of Qwen3.5-35B-A3B, for which hybrid_layers.cu is written; there may be fewer experts."""
LEAST_BLOCKS = 130
"""A quarter of a head of linear attention is a block's, and there is room for so many rows (hybrid_layers.cu)."""
THREADS, SHARED = 10 * WARP, 227 * 1024
COPIES, QUARTERS, STATE_WORDS, WORD = 4, 4, 16, 8
"""Copies of what all blocks read, parts of a head, words before those that blocks exchange, bytes of one (hybrid_layers.cu)."""
_CHANNELS, _VALUES = (2 * KEY_HEADS + VALUE_HEADS) * DIM, VALUE_HEADS * DIM
_COPY = HIDDEN + MOST_EXPERTS + _VALUES // 2 + VALUE_HEADS * QUARTERS + (TOP_K + 1) * SIZE // 2
WORDS = STATE_WORDS + _CHANNELS + _VALUES + 2 * VALUE_HEADS + COPIES * _COPY


def _renamed(fused: FusedOp, operands: dict[str, str], attrs: dict[str, str] | None = None) -> tuple[FusedCall, ...]:
    """The body of ``fused`` with other names outside, wherever these are given."""
    attrs = attrs or {}
    return tuple(
        FusedCall(
            call.op,
            {inner: operands.get(outer, outer) for inner, outer in call.operands.items()},
            {inner: attrs.get(outer, outer) for inner, outer in call.attrs.items()},
        )
        for call in fused.body
    )


_MIXTURE = (
    *_renamed(LINEAR_ADD, {"x": "attended", "weight": "output_weight", "residual": "x", "product": "output", "y": "middle"}),
    *_renamed(
        NORM_ROUTE, {"x": "middle", "norm_weight": "inner_norm", "normed": "inner_normed", "logits": "router_logits"},
        {"eps": "inner_eps", "scale": "route_scale"},
    ),
    *_renamed(MOE_SHARED_ADD, {"x": "inner_normed", "gate": "expert_gate", "up": "expert_up", "down": "expert_down", "residual": "middle"}),
)  # fmt: skip
_LAYER = (
    *_renamed(
        NORM_LINEARS,
        {
            "weight_0": "qkv_weight", "weight_1": "gate_weight", "weight_2": "b_weight", "weight_3": "a_weight",
            "y_0": "qkv", "y_1": "gate", "y_2": "b", "y_3": "a",
        },
    ),
    *_renamed(LINEAR_ATTENTION_STEP, {"attended": "raw", "norm_weight": "head_norm", "y": "attended"}),
    *_MIXTURE,
)  # fmt: skip


def _of_attention(*, chained: bool) -> tuple[FusedCall, ...]:
    """The end of a layer of full attention, from the gate on; before a chain under names of its own."""
    gated = FusedCall("sigmoid_mul", {"x": "values", "gate": "opened", "y": "attended"})
    named = {name: name for call in (gated, *_MIXTURE) for name in call.operands.values()}
    if chained:
        named = {name: f"first_{name}" for name in named} | {"x": "residual", "y": "x"}
    return tuple(
        FusedCall(call.op, {inner: named[outer] for inner, outer in call.operands.items()}, call.attrs)
        for call in (gated, *_MIXTURE)
    )


_PRODUCTS = _renamed(NORM_LINEARS, {"x": "y", "norm_weight": "last_norm", "normed": "last_normed"})
_LEFT = ("y", *NORM_LINEARS.outputs)

HYBRID_LAYERS = FusedOp("hybrid_layers", _LAYER, _LEFT, carried=("x", "y"), after=_PRODUCTS)
"""Layers of linear attention and a mixture of experts, and what full attention begins with behind them."""
MIXTURE_LAYERS = FusedOp(
    "mixture_layers", _LAYER, _LEFT, carried=("x", "y"), before=_of_attention(chained=True), after=_PRODUCTS
)
"""The same behind full attention, from its gate on: all between two such attentions."""
OUTPUT_MIXTURE = FusedOp("output_mixture", _of_attention(chained=False), ("y",), carried=("x", "y"))
"""The end of a layer of full attention: chains of one link, since each has an attention of its own before it."""

_BEFORE = (
    "norm_weight", "qkv_weight", "gate_weight", "b_weight", "a_weight", "filters", "a_log", "dt_bias", "head_norm",
)  # fmt: skip
_BEHIND = (
    "output_weight", "inner_norm", "router_weight", "expert_gate", "expert_up", "expert_down", "shared_gate_weight",
    "shared_up_weight", "shared_down_weight", "shared_weight",
)  # fmt: skip
"""Weights in the order of the kernel's struct Layer; where states lie comes between."""
_SHAPES = {
    "qkv_weight": (_CHANNELS, HIDDEN), "gate_weight": (_VALUES, HIDDEN), "b_weight": (VALUE_HEADS, HIDDEN),
    "a_weight": (VALUE_HEADS, HIDDEN), "output_weight": (HIDDEN, _VALUES), "shared_gate_weight": (SIZE, HIDDEN),
    "shared_up_weight": (SIZE, HIDDEN), "shared_down_weight": (HIDDEN, SIZE), "shared_weight": (1, HIDDEN),
    "norm_weight": (HIDDEN,), "inner_norm": (HIDDEN,), "head_norm": (DIM,), "filters": (_CHANNELS, WIDTH),
    "a_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS,),
}  # fmt: skip
_VECTORS = ("norm_weight", "inner_norm", "head_norm", "filters", "a_log", "dt_bias")
"""Weights that may be stored in several types."""
_TYPES = ("filters", "a_log", "dt_bias", "head_norm")
_PRODUCTS_BEHIND, MOST_BEHIND = 4, 12288
"""Matrices behind the layers, and their rows together: sums of so many have room (hybrid_layers.cu)."""


class _Mixtures(Implementation):
    """One block a processor, all of them resident at once: successors begin when all have begun, predecessors end by themselves.

    ``first`` says whether it begins with the end of a layer of full attention, ``layers`` whether there are layers of linear attention and products behind
    them.
    """

    module = entry = "hybrid_layers"
    rank = 60

    def __init__(self, op: str, *, first: bool, layers: bool) -> None:
        self.op = self.name = op
        self.first, self.layers = first, layers
        super().__init__()

    def links(self, need: OpNeed) -> int:
        """Layers of linear attention."""
        return sum(attr.startswith("layer.") for attr in need.attrs)

    def of_layers(self, need: OpNeed, name: str) -> list[str]:
        """A weight's name in each layer that has it, in order."""
        chained = [f"{name}.{link}" for link in range(self.links(need))]
        if name in _BEFORE or not self.first:
            return chained
        return [f"first_{name}" if self.layers else f"{name}.0", *chained]

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        stream = "residual" if self.first and self.layers else "x"
        tokens = need.operands[stream].shape[0]
        if tokens != 1 or need.max_query != 1:
            return [f"it takes one token, not {tokens}"]
        reasons = [*not_fast(need, self.element), *other_type(need, DType.F32, stream, "y")]
        if need.activation not in (None, self.element):
            reasons.append(f"it computes in {self.element.value}, not in {need.activation.value}")
        if need.processors is not None and need.processors < LEAST_BLOCKS:
            reasons.append(f"it wants {LEAST_BLOCKS} processors, and this machine has {need.processors}")
        if need.attrs["top_k"] != TOP_K:
            reasons.append(f"it chooses {TOP_K} experts, not {need.attrs['top_k']}")
        for name in (*_BEFORE, *_BEHIND) if self.layers else _BEHIND:
            reasons += self._other_weights(need, name)
        if self.layers:
            reasons += self._other_layers(need)
        return reasons

    def _other_weights(self, need: OpNeed, name: str) -> list[str]:
        """Refusals of what the layers have as this weight."""
        names = self.of_layers(need, name)
        operands = [need.operands[each] for each in names]
        vector = name in _VECTORS
        layouts = sorted({each.layout.name if each.layout else "no weight" for each in operands})
        if len(layouts) > 1:
            return [f"{name} is stored as {' and '.join(layouts)}"]
        reasons = not_stored(need, names[0], self.element.value, *([DType.F32.value] if vector else []))
        for shape in dict.fromkeys(each.shape for each in operands):
            if shape != (wanted := _wanted(name, shape)):
                reasons.append(f"{name} is {shape}, not {wanted}")
        return reasons

    def _other_layers(self, need: OpNeed) -> list[str]:
        """Refusals of linear attention and of what comes behind it."""
        attrs, reasons = need.attrs, []
        heads = attrs["key_heads"], attrs["value_heads"], attrs["key_dim"], attrs["value_dim"], attrs["unit_heads"]
        if heads != (KEY_HEADS, VALUE_HEADS, DIM, DIM, 2 * KEY_HEADS):
            reasons.append(f"linear attention has heads {heads}")
        if len({need.operands[name].layout for name in ("norm_weight.0", "inner_norm.0", "last_norm")}) > 1:
            reasons.append("weights of norms are of several types")
        behind = [need.operands[f"weight_{i}"].shape for i in range(_PRODUCTS_BEHIND)]
        if any(width != HIDDEN for _, width in behind) or sum(rows for rows, _ in behind) > MOST_BEHIND:
            reasons.append(f"products behind are {behind}: it takes {MOST_BEHIND} rows of {HIDDEN}")
        for i in range(_PRODUCTS_BEHIND):
            reasons += [*not_stored(need, f"weight_{i}", self.element.value), *other_type(need, self.element, f"y_{i}")]
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation. It keeps a table of addresses, and the words that blocks exchange."""
        if context.workers < LEAST_BLOCKS:
            raise KernelError(
                f"{self.name} wants {LEAST_BLOCKS} processors", f"this machine has {context.workers}",
                "this is a fault of whoever planned it for this machine",
            )  # fmt: skip
        attrs = need.attrs
        table, words = context.keep(self._table(need, context)), context.keep(bytes(WORD * WORDS))
        stream = "residual" if self.first and self.layers else "x"
        given = ("first_values", "first_opened") if self.layers else ("values", "opened")
        attended = addresses(context, *given) if self.first else [ptr(0)] * 2
        rows = ("cu_q", "row_slot", "slots")
        router = need.operands[self.of_layers(need, "router_weight")[0]]
        ends = (
            accumulate(need.operands[f"weight_{i}"].shape[0] for i in range(_PRODUCTS_BEHIND))
            if self.layers
            else [0] * 4
        )
        args = [
            ptr(context.counts), ptr(table), *addresses(context, stream), *attended, *addresses(context, "y"),
            *(addresses(context, *rows) if self.layers else [ptr(0)] * 3), ptr(words),
            i32(len(self.of_layers(need, "router_weight"))), i32(router.shape[0]), i32(attrs.get("slot_stride", 0)),
            vector_type(need, self.of_layers(need, "inner_norm")[0]),
            *(vector_type(need, f"{name}.0") if self.layers else i32(0) for name in _TYPES),
            *(f32(attrs.get(name, 0.0)) for name in ("eps", "l2_eps", "norm_eps", "inner_eps", "scale", "route_scale")),
            i32(int(attrs["normalise"])),
            *(addresses(context, *NORM_LINEARS.outputs) if self.layers else [ptr(0)] * 4), *map(i32, ends),
        ]  # fmt: skip
        geometry = Geometry((context.workers, 1, 1), (THREADS, 1, 1), SHARED)
        kernel = context.backend.kernel(self.module, self.entry)
        return (context.backend.prepare_launch(kernel, geometry, args, LaunchAttrs(overlap=True)),)

    def _table(self, need: OpNeed, context: BindContext) -> bytes:
        """The kernel's struct Layer, a layer after the other, and one more of norm and products behind them."""
        rows: list[list[int]] = []
        links = self.links(need)
        if self.first:
            rows.append([0] * (len(_BEFORE) + 2))
        for link in range(links):
            states = [
                context.operands[state].address
                + need.attrs[f"{layer}.{link}"] * (context.operands[state].nbytes // need.operands[state].shape[0])
                for state, layer in (("conv_state", "conv_layer"), ("state", "layer"))
            ]
            rows.append([*(context.operands[f"{name}.{link}"].address for name in _BEFORE), *states])
        for i, row in enumerate(rows):
            row += [context.operands[self.of_layers(need, name)[i]].address for name in _BEHIND]
        if self.layers:
            behind = [context.operands[name].address for name in ("last_norm", *(f"weight_{i}" for i in range(4)))]
            rows.append([*behind, *[0] * (len(rows[0]) - len(behind))])
        return b"".join(struct.pack(f"<{len(row)}Q", *row) for row in rows)


def _wanted(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a weight must have; experts may be fewer."""
    if name == "router_weight" or name.startswith("expert_"):
        experts = min(max(shape[0], TOP_K), MOST_EXPERTS)
        ends = {"router_weight": (HIDDEN,), "expert_down": (HIDDEN, SIZE)}
        return (experts, *ends.get(name, (SIZE, HIDDEN)))
    return _SHAPES[name]


def hybrids() -> list[OpImplementation]:
    """All of them."""
    return [
        _Mixtures("hybrid_layers", first=False, layers=True),
        _Mixtures("mixture_layers", first=True, layers=True),
        _Mixtures("output_mixture", first=True, layers=False),
    ]
