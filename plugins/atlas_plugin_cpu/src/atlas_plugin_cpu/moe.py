"""Mixtures of experts: routing, and the products of each token with its experts."""

from collections.abc import Mapping, Sequence

import numpy as np

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpNeed, Packed
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Arg, Geometry, f32, i32, ptr
from atlas_core.vocab.layout import StorageLayout
from atlas_plugin_cpu import packing as packings
from atlas_plugin_cpu.base import CpuImplementation, addresses, ints, matrix_refusals, vector_refusals
from atlas_plugin_cpu.packing import MATRIX_LAYOUTS, matrix_packing, vector_packing

_MAX_EXPERTS = 1024
_LANES = 16
_TASKS_A_WORKER = 4
_MATRICES = ("gate", "up", "down")
_ALIGNMENT = 64


class _Route(CpuImplementation):
    module, x = "moe", "logits"

    def _refusals(self, need: OpNeed) -> list[str]:
        experts = need.operands["logits"].shape[1]
        reasons = []
        if experts > _MAX_EXPERTS:
            reasons.append(f"chooses among at most {_MAX_EXPERTS} experts, not {experts}")
        if not 0 < need.attrs["top_k"] <= experts:
            reasons.append(f"cannot choose {need.attrs['top_k']} of {experts} experts")
        return reasons


class MoeRoute(_Route):
    """The largest logits, then their exponentials."""

    op = "moe_route"

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "logits", "experts", "weights")
        switches = i32(need.attrs["top_k"]), i32(int(need.attrs["normalise"])), f32(need.attrs["scale"])
        return (self._live(need), *operands, i32(need.operands["logits"].shape[1]), *switches)


class MoeRouteSigmoid(_Route):
    """Groups first, then experts of the open groups."""

    op = "moe_route_sigmoid"

    def _refusals(self, need: OpNeed) -> list[str]:
        experts, groups = need.operands["logits"].shape[1], need.attrs["groups"]
        reasons = [*super()._refusals(need), *vector_refusals(need, "bias")]
        if experts % groups or need.attrs["top_groups"] * (experts // groups) < need.attrs["top_k"]:
            reasons.append(f"{need.attrs['top_groups']} of {groups} groups do not hold {need.attrs['top_k']} experts")
        return reasons

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """The bias as float32."""
        return {} if vector_refusals(need, "bias") else {"bias": vector_packing(need.operands["bias"].shape)}

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "logits", "bias", "experts", "weights")
        choice = ints(need, "top_k", "groups", "top_groups")
        switches = i32(int(need.attrs["normalise"])), f32(need.attrs["scale"])
        return (self._live(need), *operands, i32(need.operands["logits"].shape[1]), *choice, *switches)


class MoeExperts(CpuImplementation):
    """Three passes: tokens sorted by expert, gate and up into scratch, down summed up where outputs are owned."""

    op, module, x = "moe_experts", "moe", "x"

    def __init__(self) -> None:
        super().__init__()
        passes = [f"{part}_{layout}_x16" for part in ("moe_gate_up", "moe_down") for layout in MATRIX_LAYOUTS]
        self.kernels = tuple(("moe", entry) for entry in ("moe_sort", *passes))

    def _refusals(self, need: OpNeed) -> list[str]:
        reasons = [reason for name in _MATRICES for reason in matrix_refusals(need, name)]
        stored = {name: need.operands[name].layout for name in _MATRICES}
        if not reasons and stored["gate"] != stored["up"]:
            reasons.append("wants gate and up stored in one layout")
        return reasons

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """Each expert's matrix interleaved by 16 rows, one behind another."""
        if self._refusals(need):
            return {}
        return {name: _packing(need, name) for name in _MATRICES}

    def pack(
        self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview
    ) -> bytes | np.ndarray:
        """See ``packing.pack``, for each expert."""
        flat, each = memoryview(data).cast("B"), layout.nbytes(shape[1:])
        if len(flat) != shape[0] * each:
            raise KernelError(
                f"a weight {list(shape)} stored as {layout.name} has {len(flat)} bytes",
                f"{shape[0] * each} were expected", "report this as a bug",
            )  # fmt: skip
        wide = matrix_packing(layout, shape[1:]).nbytes
        out = np.empty((shape[0], wide), np.uint8)
        for expert in range(shape[0]):
            out[expert] = packings.pack(packing, layout, shape[1:], flat[expert * each : (expert + 1) * each])
        return out.reshape(-1)

    def scratch_bytes(self, need: OpNeed) -> int:
        """Offsets, order, and the inner activations of every choice."""
        return sum(_sections(need))

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """Sort, gate and up, down."""
        offsets, order, _ = _sections(need)
        at = context.scratch.address
        where = ptr(at), ptr(at + offsets)
        inner = ptr(at + offsets + order)
        experts, size, hidden = need.operands["gate"].shape
        top_k = need.operands["experts"].shape[1]
        counts = ptr(context.counts), self._live(need)
        chosen, weights = addresses(context, "experts", "weights")
        x, gate, up, down, y = addresses(context, "x", *_MATRICES, "y")
        sizes = i32(hidden), i32(size), i32(experts), i32(top_k)
        gate_up, whole = _entry(need, "moe_gate_up", "gate"), _entry(need, "moe_down", "down")
        return (
            self._launch(context, "moe_sort", 1, (*counts, chosen, *where, i32(experts), i32(top_k))),
            self._launch(context, gate_up, size, (x, gate, up, *where, inner, *sizes)),
            self._launch(context, whole, hidden, (*counts, inner, down, *where, weights, y, *sizes)),
        )

    def _launch(self, context: BindContext, entry: str, outputs: int, args: tuple[Arg, ...]) -> Launch:
        tasks = max(1, min(-(-outputs // _LANES), _TASKS_A_WORKER * context.workers))
        kernel = context.backend.kernel(self.module, entry)
        return context.backend.prepare_launch(kernel, Geometry(grid=(tasks, 1, 1)), args)

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        raise KernelError("moe_experts is bound pass by pass", "no single kernel runs it", "report this as a bug")


def _packing(need: OpNeed, name: str) -> Packed:
    operand = need.operands[name]
    assert operand.layout is not None
    one = matrix_packing(operand.layout, operand.shape[1:])
    return Packed(one.name, operand.shape[0] * one.nbytes)


def _entry(need: OpNeed, stem: str, weight: str) -> str:
    layout = need.operands[weight].layout
    return f"{stem}_{layout.name if layout else ''}_x16"


def _sections(need: OpNeed) -> tuple[int, int, int]:
    """Bytes of offsets, order and inner activations."""
    tokens, top_k = need.operands["experts"].shape
    experts, size, _ = need.operands["gate"].shape
    parts = 4 * (experts + 1), 4 * tokens * top_k, 4 * tokens * top_k * size
    first, second, third = (-(-part // _ALIGNMENT) * _ALIGNMENT for part in parts)
    return first, second, third
