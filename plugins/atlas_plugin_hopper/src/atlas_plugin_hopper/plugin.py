"""What this distribution offers: the H100 and H200."""

from atlas_core.contracts.declarations import GpuBackendDecl, KernelRoot
from atlas_core.hookspecs import hookimpl


class Hopper:
    """Hardware ``hopper``: kernels, implementations and fused ops come from ``nvidia``, which it extends."""

    @hookimpl
    def atlas_gpu_backend(self) -> GpuBackendDecl:
        """The machine."""
        return GpuBackendDecl(
            hardware="hopper",
            backend="atlas_nvidia.backend:open_backend",
            probe="atlas_nvidia.probe:probe_sm90",
            kernel_roots=(KernelRoot("atlas_plugin_hopper"),),
        )


hopper = Hopper()
