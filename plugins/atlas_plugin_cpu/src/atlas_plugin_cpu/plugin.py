"""The plugin ``cpu``: a toolchain for C++ kernels, and the CPU as a machine."""

from atlas_core.contracts.declarations import ComputeTargetDecl, GpuBackendDecl, KernelRoot
from atlas_core.hookspecs import hookimpl


class CpuPlugin:
    """What the distribution offers; everything heavy stands behind strings."""

    @hookimpl
    def atlas_compute_target(self) -> ComputeTargetDecl:
        """G++, clang++ or zig, making shared objects."""
        return ComputeTargetDecl("cpu", "atlas_plugin_cpu.toolchain:CpuComputeTarget")

    @hookimpl
    def atlas_gpu_backend(self) -> GpuBackendDecl:
        """The processors and memory of this host."""
        return GpuBackendDecl(
            hardware="cpu",
            backend="atlas_plugin_cpu.backend:open_backend",
            probe="atlas_plugin_cpu.machine:probe",
            kernel_roots=(KernelRoot("atlas_plugin_cpu"),),
            implementations="atlas_plugin_cpu.implementations:implementations",
            fused="atlas_plugin_cpu.fused:fused_ops",
            bucketed=False,
            runs_arch="atlas_plugin_cpu.machine:runs",
        )


cpu = CpuPlugin()
