"""What this distribution offers: CUDA's toolchain, and the kernels and implementations that all NVIDIA machines inherit."""

from atlas_core.contracts.declarations import ComputeTargetDecl, GpuBackendDecl, KernelRoot
from atlas_core.hookspecs import hookimpl


class Nvidia:
    """Hardware ``nvidia``: abstract; real machines extend it."""

    @hookimpl
    def atlas_compute_target(self) -> ComputeTargetDecl:
        """nvcc."""
        return ComputeTargetDecl("nvidia", "atlas_nvidia.toolchain:NvidiaComputeTarget")

    @hookimpl
    def atlas_gpu_backend(self) -> GpuBackendDecl:
        """Baseline kernels and what runs on them."""
        return GpuBackendDecl(
            hardware="nvidia",
            backend="atlas_nvidia.backend:open_backend",
            probe="atlas_nvidia.probe:probe_any",
            kernel_roots=(KernelRoot("atlas_nvidia"),),
            implementations="atlas_nvidia.implementations:implementations",
            fused="atlas_nvidia.fused:fused_ops",
        )


nvidia = Nvidia()
