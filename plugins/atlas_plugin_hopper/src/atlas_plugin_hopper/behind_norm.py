"""What begins with a norm of the residual stream in a launch of its own; products of the normalised tokens follow."""

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, f32, i32, ptr
from atlas_nvidia.implementations.base import Implementation, addresses, live_word, vector_type
from atlas_plugin_hopper.tiles import Normed


class BehindNorm(Implementation):
    """The norm of ``x`` by ``norm_weight``: its result, in the element type, lies in scratch."""

    @property
    def norm(self) -> tuple[str, str]:
        """Module and entry of its kernel."""
        return ("rms_norm" if self.element is DType.BF16 else f"rms_norm_{self.element.value}"), "rms_norm"

    def scratch_bytes(self, need: OpNeed) -> int:
        """The normalised tokens."""
        tokens, width = need.operands["x"].shape
        return 2 * tokens * width

    def normalise(self, need: OpNeed, context: BindContext) -> tuple[Launch, Normed]:
        """The norm's launch, and what it leaves."""
        tokens, width = need.operands["x"].shape
        args = [
            ptr(context.counts), live_word(need.operands["x"]), *addresses(context, "x", "norm_weight"),
            ptr(context.scratch.address), i32(width), f32(need.attrs["eps"]), vector_type(need, "norm_weight"),
        ]  # fmt: skip
        kernel, geometry = context.backend.kernel(*self.norm), Geometry((tokens, 1, 1), (256, 1, 1))
        launch = context.backend.prepare_launch(kernel, geometry, args, LaunchAttrs(overlap=True))
        return launch, Normed(context.scratch.address)
