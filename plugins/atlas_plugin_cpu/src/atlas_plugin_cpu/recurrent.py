"""Linear attention: ops whose states outlive the step."""

from collections.abc import Mapping

import numpy as np

from atlas_core.contracts.ops import BindContext, OpNeed, Packed
from atlas_core.vocab.kernel import Arg, f32, i32, ptr
from atlas_core.vocab.layout import StorageLayout
from atlas_plugin_cpu import packing as packings
from atlas_plugin_cpu.base import CpuImplementation, addresses, ints, vector_refusals
from atlas_plugin_cpu.packing import vector_packing

_MAX_WIDTH = 8
_MAX_KEY_DIM = 256
_LANES = 16
_TASKS_A_WORKER = 4
_TAPS = "f32_taps"
"""Packing of a convolution's weight: float32 [width, channels]."""


class _Recurrent(CpuImplementation):
    module = "recurrent"

    def _layer(self, need: OpNeed, context: BindContext) -> Arg:
        """Where the states of the node's layer begin."""
        state = context.operands["state"]
        return ptr(state.address + need.attrs["layer"] * (state.nbytes // need.operands["state"].shape[0]))


class CausalConv1d(_Recurrent):
    """Tasks own channels and walk along every row."""

    op, x = "causal_conv1d", "x"

    def _refusals(self, need: OpNeed) -> list[str]:
        width = need.operands["weight"].shape[1]
        reasons = vector_refusals(need, "weight")
        if not 1 < width <= _MAX_WIDTH:
            reasons.append(f"looks back over 2 to {_MAX_WIDTH} inputs, not {width}")
        return reasons

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """Taps outermost, so that one load brings a tap of 16 channels."""
        if vector_refusals(need, "weight"):
            return {}
        channels, width = need.operands["weight"].shape
        return {"weight": Packed(_TAPS, 4 * channels * width)}

    def pack(
        self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview
    ) -> bytes | np.ndarray:
        """float32, transposed."""
        flat = np.asarray(packings.pack(packings.VECTOR if packing == _TAPS else packing, layout, shape, data))
        return np.ascontiguousarray(flat.view(np.float32).reshape(shape).T).reshape(-1).view(np.uint8)

    def _tasks(self, need: OpNeed, context: BindContext) -> int:
        blocks = -(-need.operands["x"].shape[1] // _LANES)
        return max(1, min(blocks, _TASKS_A_WORKER * context.workers))

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        channels, width = need.operands["weight"].shape
        operands = addresses(context, "x", "weight", "cu_q", "row_slot", "slots")
        sizes = i32(channels), i32(width), *ints(need, "slot_stride")
        return (*operands, self._layer(need, context), *addresses(context, "y"), *sizes)


class GatedDeltaRule(_Recurrent):
    """The recurrence itself: 16 values of a head at a time, their state in the first cache."""

    op, x = "gated_delta_rule", "qkv"

    def _refusals(self, need: OpNeed) -> list[str]:
        reasons = [*vector_refusals(need, "a_log"), *vector_refusals(need, "dt_bias")]
        if need.attrs["key_dim"] > _MAX_KEY_DIM:
            reasons.append(f"takes keys of at most {_MAX_KEY_DIM} dimensions, not {need.attrs['key_dim']}")
        if need.attrs["value_heads"] % need.attrs["key_heads"]:
            reasons.append(
                f"{need.attrs['value_heads']} value heads do not share {need.attrs['key_heads']} key heads evenly"
            )
        return reasons

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """Both vectors as float32."""
        if self._refusals(need):
            return {}
        return {name: vector_packing(need.operands[name].shape) for name in ("a_log", "dt_bias")}

    def _tasks(self, need: OpNeed, context: BindContext) -> int:
        parts: int = need.sequences * need.attrs["value_heads"] * -(-need.attrs["value_dim"] // _LANES)
        return max(1, min(parts, _TASKS_A_WORKER * context.workers))

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "qkv", "a", "b", "a_log", "dt_bias", "cu_q", "row_slot", "slots")
        sizes = ints(need, "key_heads", "value_heads", "key_dim", "value_dim")
        scale = f32(need.attrs["scale"]), *ints(need, "slot_stride")
        return (*operands, self._layer(need, context), *addresses(context, "y"), *sizes, *scale)
