"""How the ops run on NVIDIA machines: which kernel for which shapes, with which geometry and arguments."""

from atlas_core.contracts.ops import OpImplementation
from atlas_nvidia.implementations import (
    attention,
    coded_experts,
    delta,
    fused,
    heads,
    linear,
    linear_attention,
    moe,
    route,
    rows,
    sampling,
    scaled,
    scaled_fused,
    wide_linear,
)


def implementations() -> list[OpImplementation]:
    """All of them; no two of one op accept one need with one rank."""
    return [
        *rows.ALL, *linear.ALL, *attention.ALL, *fused.ALL, *heads.ALL, *linear_attention.ALL, *delta.ALL, *moe.ALL, *route.ALL,
        *sampling.ALL, *scaled.ALL, *scaled_fused.ALL, *coded_experts.ALL, *wide_linear.ALL,
    ]  # fmt: skip
