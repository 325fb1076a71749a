"""The ops of a dense layer outside attention."""

from collections.abc import Mapping

from atlas_core.contracts.ops import BindContext, OpNeed, Packed
from atlas_core.vocab.kernel import Arg, f32, i32
from atlas_plugin_cpu.base import CpuImplementation, addresses, ints, matrix_refusals, vector_refusals
from atlas_plugin_cpu.packing import MATRIX_LAYOUTS, matrix_packing, vector_packing

_PAIR = 32
_TASKS_A_WORKER = 8
_MAX_ROTATED = 256


class _Matrix(CpuImplementation):
    """An op that reads a weight matrix, by one kernel for each storage."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = tuple(("linear", f"{self.op}_{layout}_x16") for layout in MATRIX_LAYOUTS)

    def _refusals(self, need: OpNeed) -> list[str]:
        return matrix_refusals(need, "weight")

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """The weight interleaved by 16 rows; embed and linear read the same, so a tied weight is held once."""
        weight = need.operands["weight"]
        if weight.layout is None or matrix_refusals(need, "weight"):
            return {}
        return {"weight": matrix_packing(weight.layout, weight.shape)}

    def _kernel(self, need: OpNeed) -> tuple[str, str]:
        layout = need.operands["weight"].layout
        return "linear", f"{self.op}_{layout.name if layout else ''}_x16"


class Linear(_Matrix):
    """Dequantise and multiply in one pass; the sum of an output is always taken in the same order."""

    op, module, x = "linear", "linear", "x"

    def _tasks(self, need: OpNeed, context: BindContext) -> int:
        """Spread over outputs, in pairs of 16."""
        pairs = -(-need.operands["weight"].shape[0] // _PAIR)
        return max(1, min(pairs, _TASKS_A_WORKER * context.workers))

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        outputs, columns = need.operands["weight"].shape
        return (self._live(need), *addresses(context, "x", "weight", "y"), i32(columns), i32(outputs))


class Embed(_Matrix):
    """Rows of the table, decoded."""

    op, module, x = "embed", "linear", "tokens"

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        return (*addresses(context, "tokens", "weight", "y"), i32(need.operands["weight"].shape[1]))


class _Rows(CpuImplementation):
    """Elementwise over rows: ``operands`` in the kernel's order."""

    module, x = "elementwise", "x"
    operands: tuple[str, ...] = ("x",)
    vector: str = ""

    def _refusals(self, need: OpNeed) -> list[str]:
        return vector_refusals(need, self.vector) if self.vector else []

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """A weight vector as float32."""
        if not self.vector or vector_refusals(need, self.vector):
            return {}
        return {self.vector: vector_packing(need.operands[self.vector].shape)}

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        return (self._live(need), *addresses(context, *self.operands), i32(need.operands[self.x].shape[1]))


class RmsNorm(_Rows):
    """Sums squares in 16 lanes."""

    op, vector, operands = "rms_norm", "weight", ("x", "weight", "y")

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        return (*super()._arguments(need, context), f32(need.attrs["eps"]))


class Add(_Rows):
    """Residual sum."""

    op, operands = "add", ("x", "z", "y")


class BiasAdd(_Rows):
    """One vector to every row."""

    op, vector, operands = "bias_add", "bias", ("x", "bias", "y")


class SiluMul(_Rows):
    """SwiGLU gate."""

    op, x, operands = "silu_mul", "gate", ("gate", "up", "y")


class GeluMul(_Rows):
    """GeGLU gate."""

    op, x, operands = "gelu_mul", "gate", ("gate", "up", "y")


class Rope(CpuImplementation):
    """Angles in double precision, so that late positions are as exact as early ones."""

    op, module, x = "rope", "elementwise", "x"

    def _refusals(self, need: OpNeed) -> list[str]:
        rotated = 2 * need.operands["inv_freq"].shape[0]
        return [f"rotates at most {_MAX_ROTATED} dimensions, not {rotated}"] if rotated > _MAX_ROTATED else []

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        half = need.operands["inv_freq"].shape[0]
        operands = addresses(context, "x", "positions", "inv_freq", "y")
        return (*operands, *ints(need, "heads", "head_dim"), i32(half), f32(need.attrs["scale"]))


class GatherRows(CpuImplementation):
    """Rows whose logits are wanted."""

    op, module, x = "gather_rows", "elementwise", "y"

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        return (*addresses(context, "x", "logits_rows", "y"), i32(need.operands["x"].shape[1]))
