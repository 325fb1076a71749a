"""What this distribution offers: the H100 and H200."""

from atlas_core.contracts.declarations import GpuBackendDecl, KernelRoot
from atlas_core.hookspecs import hookimpl


class Hopper:
    """Hardware ``hopper`` extends ``nvidia``: what wgmma and the copy engine do better is its own."""

    @hookimpl
    def atlas_gpu_backend(self) -> GpuBackendDecl:
        """The machine."""
        return GpuBackendDecl(
            hardware="hopper",
            backend="atlas_nvidia.backend:open_backend",
            wake="atlas_nvidia.driver:wake",
            probe="atlas_nvidia.probe:probe_sm90",
            kernel_roots=(KernelRoot("atlas_plugin_hopper"),),
            implementations="atlas_plugin_hopper.implementations:implementations",
            fused="atlas_plugin_hopper.fused:fused_ops",
        )


hopper = Hopper()
