"""Norms of single heads, and products with gates."""

from collections.abc import Mapping

from atlas_core.contracts.ops import BindContext, OpNeed, Packed
from atlas_core.vocab.kernel import Arg, f32, i32
from atlas_plugin_cpu.base import CpuImplementation, addresses, ints, vector_refusals
from atlas_plugin_cpu.packing import vector_packing


class _Heads(CpuImplementation):
    module, x = "heads", "x"


class _HeadNorm(_Heads):
    """Sums squares in 16 lanes; ``operands`` in the kernel's order."""

    operands: tuple[str, ...]

    def _refusals(self, need: OpNeed) -> list[str]:
        return vector_refusals(need, "weight")

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """The weight of a head as float32."""
        return {} if self._refusals(need) else {"weight": vector_packing(need.operands["weight"].shape)}

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        columns, dim = need.operands["x"].shape[1], need.operands["weight"].shape[0]
        operands = addresses(context, *self.operands)
        return (self._live(need), *operands, i32(columns), i32(dim), f32(need.attrs["eps"]))


class HeadRmsNorm(_HeadNorm):
    """One weight for all heads."""

    op, operands = "head_rms_norm", ("x", "weight", "y")


class GatedRmsNorm(_HeadNorm):
    """The gate in the same pass."""

    op, operands = "gated_rms_norm", ("x", "gate", "weight", "y")


class L2Norm(_Heads):
    """Heads first; features behind them are copied."""

    op = "l2_norm"

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "x", "y")
        columns = i32(need.operands["x"].shape[1])
        return (self._live(need), *operands, columns, *ints(need, "heads", "head_dim"), f32(need.attrs["eps"]))


class SigmoidMul(_Heads):
    """One gate for each feature, or for the row."""

    op = "sigmoid_mul"

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        columns, gates = need.operands["x"].shape[1], need.operands["gate"].shape[1]
        return (self._live(need), *addresses(context, "x", "gate", "y"), i32(columns), i32(gates))
