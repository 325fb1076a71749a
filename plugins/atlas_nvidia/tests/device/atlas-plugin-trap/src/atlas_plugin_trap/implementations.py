"""The embedding, followed by a kernel that fails: at a certain token, or at every launch."""

import os
from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, i32, ptr
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import addresses
from atlas_nvidia.implementations.rows import Embed

TOKEN = 77
"""Whoever sends it loses the device."""
NOWHERE = 0x1000
"""An address that nothing is mapped at."""
REFUSED = "TRAP_LAUNCH"
"""A variable that makes the launch itself one that no driver accepts: more cooperative blocks than there is room for."""
ONE, FAR_TOO_MANY = Geometry((1, 1, 1), (256, 1, 1)), Geometry((1 << 20, 1, 1), (256, 1, 1))


class TrappedEmbed(Embed):
    """Takes the place of the inherited one, whose name it has."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = (*self.kernels, ("trap", "trap"))

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """What is inherited, and the trap behind it."""
        args = [ptr(context.counts), *addresses(context, "tokens"), i32(TOKEN), ptr(NOWHERE)]
        refused = REFUSED in os.environ
        trap = context.backend.prepare_launch(
            context.backend.kernel("trap", "trap"),
            FAR_TOO_MANY if refused else ONE,
            args,
            LaunchAttrs(cooperative=refused),
        )
        return (*super().bind(need, context), trap)


def implementations() -> list[OpImplementation]:
    """The one."""
    return [TrappedEmbed()]


def probe() -> Verdict:
    """Below every real machine."""
    return Verdict.yes(-1000, "for tests only")
