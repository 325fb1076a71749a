"""Every op of core, by the CPU's kernels."""

from atlas_core.contracts.ops import OpImplementation
from atlas_plugin_cpu import cached, dense, heads, tail


def implementations() -> list[OpImplementation]:
    """One implementation of each primitive."""
    return [
        tail.StepBegin(),
        dense.Embed(),
        dense.RmsNorm(),
        dense.Add(),
        dense.BiasAdd(),
        dense.Linear(),
        dense.Rope(),
        cached.KvAppend(),
        cached.PagedAttention(),
        dense.SiluMul(),
        dense.GatherRows(),
        heads.HeadRmsNorm(),
        heads.GatedRmsNorm(),
        heads.L2Norm(),
        heads.SigmoidMul(),
        tail.ProcessLogits(),
        tail.Sample(),
        tail.Logprobs(),
        tail.Advance(),
    ]
