"""How the ops run on NVIDIA machines: which kernel for which shapes, with which geometry and arguments."""

from atlas_core.contracts.ops import OpImplementation
from atlas_nvidia.implementations import attention, fused, heads, linear, moe, route, rows, sampling


def implementations() -> list[OpImplementation]:
    """All of them; no two of one op accept one need with one rank."""
    return [*rows.ALL, *linear.ALL, *attention.ALL, *fused.ALL, *heads.ALL, *moe.ALL, *route.ALL, *sampling.ALL]
