"""Mixtures with an expert for all tokens, 9 to 64 tokens: that expert by the copy engine, the others as they are streamed anyway."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, Buffer, OperandSpec, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.heads import SigmoidMul
from atlas_nvidia.implementations.linear import Tiled
from atlas_nvidia.implementations.moe import Streamed
from atlas_nvidia.implementations.rows import Add
from atlas_plugin_hopper.skinny import GATE_UP_ROWS, LINEAR_ROWS, gate_up, linear
from atlas_plugin_hopper.skinny_chains import FEW
from atlas_plugin_hopper.tiles import Normed, Product

_ROUTED = ("x", "experts", "weights", "gate", "up", "down", "residual", "y")
_ALIGNMENT = 256


class SharedBeside(Streamed):
    """Seven launches instead of two. As one more expert it is as many units as it takes to hold all tokens, and these lie in few blocks.

    A step of 64 tokens of Qwen3.5-35B-A3B waits 100 µs a layer for them (docs/measured-facts.md).
    """

    def __init__(self, element: DType) -> None:
        super().__init__(16, "moe_shared_add", element)
        self.name = self.name.replace("streamed_16", "beside")
        self._routed = Streamed(16, "moe_experts_add", element)
        self._middle = Product("skinny_gate_up", GATE_UP_ROWS, element, unit=2)
        self._down = Product("skinny_linear", LINEAR_ROWS, element)
        self._parts = Tiled(64, False, element), SigmoidMul(element), Add(element)
        self.kernels = tuple(
            dict.fromkeys(
                kernel for part in (self._routed, self._middle, self._down, *self._parts) for kernel in part.kernels
            )
        )

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation."""
        reasons = self.refusals(need)
        return Verdict.no(*reasons) if reasons else Verdict.yes(65)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons, tokens = super().refusals(need), need.operands["x"].shape[0]
        if tokens <= FEW:
            reasons.append(f"up to {FEW} tokens of it are streamed with those of the other experts")
        if need.operands["x"].live != "T":
            reasons.append("its products count the tokens of the step")
        return reasons

    def scratch_bytes(self, need: OpNeed) -> int:
        """See ``_sections``."""
        return self._sections(need)[-1]

    def _sections(self, need: OpNeed) -> list[int]:
        """Where the scratch of the routed experts, what lies between the products, openings and results begin; and the end."""
        tokens, hidden = need.operands["x"].shape
        size = need.operands["shared_gate_weight"].shape[0]
        starts = [0]
        for nbytes in (
            self._routed.scratch_bytes(self._of_routed(need)),
            2 * tokens * size,
            2 * tokens,
            2 * tokens * hidden,
        ):
            starts.append(starts[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        return starts

    def _of_routed(self, need: OpNeed) -> OpNeed:
        return replace(need, op="moe_experts_add", operands={name: need.operands[name] for name in _ROUTED})

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        tokens, hidden = need.operands["x"].shape
        size, live = need.operands["shared_gate_weight"].shape[0], need.operands["x"].live
        starts = self._sections(need)
        inner, opening, result = (
            Buffer(context.scratch.address + start, end - start) for start, end in pairwise(starts[1:])
        )

        def activation(width: int) -> OperandSpec:
            return OperandSpec((tokens, width), self.element, None, live)

        def part(
            op: str, specs: Mapping[str, OperandSpec], buffers: Mapping[str, Buffer]
        ) -> tuple[OpNeed, BindContext]:
            of_part = replace(need, op=op, operands=specs, attrs={"eps": 0.0})
            return of_part, replace(context, operands=buffers, scratch=Buffer(context.scratch.address, starts[1]))

        given, of = need.operands, context.operands
        product, sigmoid_mul, add = self._parts
        middle = part(
            "norm_gate_up_silu",
            {"x": given["x"], "gate_weight": given["shared_gate_weight"], "up_weight": given["shared_up_weight"]},
            {"gate_weight": of["shared_gate_weight"], "up_weight": of["shared_up_weight"], "y": inner},
        )
        return (
            gate_up(self._middle, *middle, Normed(of["x"].address), "y"),
            *product.bind(*part(
                "linear", {"x": given["x"], "weight": given["shared_weight"], "y": activation(1)},
                {"x": of["x"], "weight": of["shared_weight"], "y": opening},
            )),
            linear(self._down, *part(
                "linear", {"x": activation(size), "weight": given["shared_down_weight"], "y": activation(hidden)},
                {"x": inner, "weight": of["shared_down_weight"], "y": result},
            )),
            *sigmoid_mul.bind(*part(
                "sigmoid_mul", {"x": activation(hidden), "gate": activation(1), "y": activation(hidden)},
                {"x": result, "gate": opening, "y": result},
            )),
            *self._routed.bind(self._of_routed(need), context),
            *add.bind(*part(
                "add", {"x": given["y"], "z": activation(hidden), "y": given["y"]},
                {"x": of["y"], "z": result, "y": of["y"]},
            )),
        )  # fmt: skip
