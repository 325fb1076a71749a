"""Products with activations rounded to 8-bit integers: linear layers of fast numerics, and what they are fused with."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, Buffer, KVLayout, OpNeed, Packed
from atlas_core.vocab.kernel import Arg, Geometry, f32, i32, i64, ptr
from atlas_core.vocab.verdict import Verdict
from atlas_plugin_cpu.base import RANK, CpuImplementation, vector_refusals
from atlas_plugin_cpu.cached import FastPagedAttention
from atlas_plugin_cpu.packing import matrix_packing, vector_packing

LAYOUTS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs")
"""Storage layouts in the order in which fast.cpp numbers them."""
_BLOCK = 32
_SET_ROWS = 16
_ALONE = 4
_GROUP = 16
_FLOAT = 4
_TASKS_A_WORKER = 4
_MOST_TASKS = 128
_MOST_PRODUCTS = 3
_STORE, _ADD, _GATE, _TWICE = range(4)


class _Product(NamedTuple):
    """Operands of one product: a weight matrix and where the result goes."""

    weight: str
    y: str


class _Fast(CpuImplementation):
    """One or more products that share activations; ``products`` are in the kernel's order."""

    module = "fast"
    x = "x"
    products: tuple[_Product, ...] = (_Product("weight", "y"),)
    norm: str = ""
    other: str = ""
    mode = _STORE

    def __init__(self) -> None:
        super().__init__()
        self.name = f"cpu.fast_{self.op}"
        self.kernels = (("fast", "fast_prepare"), ("fast", "fast_multiply"))

    def supports(self, need: OpNeed) -> Verdict:
        """Yes for fast numerics when every matrix is stored in blocks."""
        verdict = super().supports(need)
        if not verdict.ok:
            return verdict
        return Verdict.yes(
            RANK, "activations rounded to int8 in blocks of 32, exact integer sums, bits independent of batch"
        )

    def _refusals(self, need: OpNeed) -> list[str]:
        reasons = [] if need.numerics == "fast" else ["rounds activations to int8, which exact numerics do not"]
        if (need.operands[self.x].live == "R") != (self.mode == _TWICE):
            reasons.append("rounds logits' rows more finely than others: that is another implementation's part")
        for product in self.products:
            layout = need.operands[product.weight].layout
            if layout is None or layout.name not in LAYOUTS:
                stored = "nothing known" if layout is None else layout.name
                reasons.append(f"reads {', '.join(LAYOUTS)}, and {product.weight} is stored as {stored}")
        return reasons + (vector_refusals(need, self.norm) if self.norm else [])

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """Matrices interleaved by 16 rows, as the exact kernels read them; the norm as float32."""
        found = {}
        for product in self.products:
            layout = need.operands[product.weight].layout
            if layout is not None and layout.name in LAYOUTS:
                found[product.weight] = matrix_packing(layout, need.operands[product.weight].shape)
        if self.norm and not vector_refusals(need, self.norm):
            found[self.norm] = vector_packing(need.operands[self.norm].shape)
        return found

    def scratch_bytes(self, need: OpNeed) -> int:
        """Rows as integers in whole sets of 16, and room for every task; the tasks are not known before ``bind``."""
        return self._prepared_bytes(need) + _MOST_TASKS * self._own_bytes(need)

    def _columns(self, need: OpNeed) -> int:
        return need.operands[self.x].shape[1]

    def _prepared_bytes(self, need: OpNeed) -> int:
        rows = need.operands[self.x].shape[0] * (2 if self.mode == _TWICE else 1)
        sets = -(-rows // _SET_ROWS)
        return sets * _SET_ROWS * _row_bytes(self._columns(need))

    def _own_bytes(self, need: OpNeed) -> int:
        """Room of one task, with a float for every row and output of a group of gates."""
        gates = _FLOAT * _GROUP * need.operands[self.x].shape[0] if self.mode == _GATE else 0
        return _room_bytes(self._columns(need)) + gates

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """Rounding, which is left to the products when there are few rows, then the products."""
        prepare, multiply = (context.backend.kernel(*kernel) for kernel in self.kernels[-2:])
        rows = Geometry(grid=(self._tasks(need, context), 1, 1))
        groups = Geometry(grid=(self._product_tasks(need, context), 1, 1))
        shared = (*self._source(need, context), i32(self._columns(need)), self._eps(need), i32(self.mode))
        return (
            context.backend.prepare_launch(prepare, rows, shared),
            context.backend.prepare_launch(multiply, groups, self._arguments(need, context)),
        )

    def _source(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        norm = _address(context, self.norm) if self.norm else ptr(0)
        return ptr(context.counts), self._live(need), self._rows(need, context), norm, ptr(context.scratch.address)

    def _rows(self, need: OpNeed, context: BindContext) -> Arg:
        """Where the activations are."""
        return _address(context, self.x)

    def _eps(self, need: OpNeed) -> Arg:
        return f32(need.attrs["eps"] if self.norm else 0.0)

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        columns = self._columns(need)
        room = context.scratch.address + self._prepared_bytes(need)
        other = _address(context, self.other) if self.other else ptr(0)
        arguments = [
            *self._source(need, context), ptr(room), i64(self._own_bytes(need)), i64(_room_bytes(columns)),
            i32(columns), self._eps(need), i32(self.mode), other,
        ]  # fmt: skip
        for product in self.products:
            weight, y = _address(context, product.weight), _address(context, product.y)
            arguments += [weight, i32(self._number(need, product)), y, i32(need.operands[product.weight].shape[0])]
        return (*arguments, *(ptr(0), i32(0), ptr(0), i32(0)) * (_MOST_PRODUCTS - len(self.products)))

    @staticmethod
    def _number(need: OpNeed, product: _Product) -> int:
        layout = need.operands[product.weight].layout
        return LAYOUTS.index(layout.name) if layout else -1

    def _product_tasks(self, need: OpNeed, context: BindContext) -> int:
        """One for a thread by itself; else some for each, so that one that comes late takes less."""
        if context.workers == 1:
            return 1
        groups = sum(-(-need.operands[product.weight].shape[0] // _GROUP) for product in self.products)
        return max(1, min(groups, _TASKS_A_WORKER * context.workers, _MOST_TASKS))


def _row_bytes(columns: int) -> int:
    """A row as integers, with scales and sums of its blocks: see Prepared in integers.h."""
    return columns * 3 // 2


def _room_bytes(columns: int) -> int:
    """Room of one task: a group of weights as tiles read it, or the few rows that it rounds itself."""
    return max(columns // _BLOCK * (512 + 128), _ALONE * _row_bytes(columns))


def _address(context: BindContext, name: str) -> Arg:
    return ptr(context.operands[name].address)


class FastLinear(_Fast):
    """A product by itself."""

    op = "linear"


class FastHead(_Fast):
    """Logits: each row as two of 8 bits, 128 times the one plus the other, which costs nothing beside reading the weight."""

    op, mode = "linear", _TWICE

    def __init__(self) -> None:
        super().__init__()
        self.name = "cpu.fast_head"

    def supports(self, need: OpNeed) -> Verdict:
        """Yes for the logits of fast numerics."""
        verdict = super().supports(need)
        return Verdict.yes(RANK, "activations rounded to 15 bits in blocks of 32") if verdict.ok else verdict


class FastLinearAdd(_Fast):
    """A product, added to what came before the layer."""

    op, mode, other = "linear_add", _ADD, "residual"


class FastAttentionLinearAdd(FastLinearAdd):
    """Attention with factors rounded to bf16, where what it gives is rounded to int8 for the next weight anyway.

    Weights that are not stored in blocks lose nothing in fast numerics; nor does their attention, which is then exact.
    """

    op, x = "attention_linear_add", "q"  # what attention gives has the shape of q

    def __init__(self) -> None:
        super().__init__()
        self._attention = FastPagedAttention()
        self.kernels = (*self._attention.kernels, *self.kernels)

    def _refusals(self, need: OpNeed) -> list[str]:
        refused = self._attention.supports(need)
        return ([] if refused.ok else list(refused.reasons)) + super()._refusals(need)

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """Those of the exact attention."""
        return self._attention.kv_layouts(need)

    def scratch_bytes(self, need: OpNeed) -> int:
        """What products need, and then the rows that attention gives."""
        return super().scratch_bytes(need) + self._attended_bytes(need)

    def _attended_bytes(self, need: OpNeed) -> int:
        rows, columns = need.operands[self.x].shape
        return _FLOAT * rows * columns

    def _attended(self, need: OpNeed, context: BindContext) -> Buffer:
        return Buffer(context.scratch.address + super().scratch_bytes(need), self._attended_bytes(need))

    def _rows(self, need: OpNeed, context: BindContext) -> Arg:
        return ptr(self._attended(need, context).address)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """Attention, rounding, the product."""
        within = replace(context, operands={**context.operands, "y": self._attended(need, context)})
        return (*self._attention.bind(need, within), *super().bind(need, context))


class FastNormQkv(_Fast):
    """A norm, and three products with the same rounded rows."""

    op, norm = "norm_qkv", "norm_weight"
    products = (_Product("q_weight", "q"), _Product("k_weight", "k"), _Product("v_weight", "v"))


class FastNormGateUp(_Fast):
    """A norm, two products with the same rounded rows, and the gate."""

    op, norm, mode = "norm_gate_up_silu", "norm_weight", _GATE
    products = (_Product("gate_weight", "y"), _Product("up_weight", "y"))
