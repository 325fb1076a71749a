"""Every op of core, by the CPU's kernels."""

from atlas_core.contracts.ops import OpImplementation
from atlas_plugin_cpu import cached, dense, fast, heads, moe, recurrent, tail


def implementations() -> list[OpImplementation]:
    """One implementation of each primitive by exact arithmetic, and faster ones for fast numerics."""
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
        dense.GeluMul(),
        dense.GatherRows(),
        heads.HeadRmsNorm(),
        heads.GatedRmsNorm(),
        heads.L2Norm(),
        heads.SigmoidMul(),
        moe.MoeRoute(),
        moe.MoeRouteSigmoid(),
        moe.MoeExperts(),
        recurrent.CausalConv1d(),
        recurrent.GatedDeltaRule(),
        tail.ProcessLogits(),
        tail.Sample(),
        tail.Logprobs(),
        tail.Advance(),
        fast.FastLinear(),
        fast.FastHead(),
        fast.FastLinearAdd(),
        fast.FastAttentionLinearAdd(),
        fast.FastNormQkv(),
        fast.FastNormGateUp(),
    ]
