"""What this distribution offers: GB10, the processor of DGX Spark."""

from atlas_core.contracts.declarations import GpuBackendDecl, KernelRoot
from atlas_core.hookspecs import hookimpl


class Gb10:
    """Hardware ``gb10``: it extends ``nvidia``; rings are shorter, and there is what only compute capability 12.x has."""

    @hookimpl
    def atlas_gpu_backend(self) -> GpuBackendDecl:
        """The machine."""
        return GpuBackendDecl(
            hardware="gb10",
            backend="atlas_nvidia.backend:open_backend",
            wake="atlas_nvidia.driver:wake",
            probe="atlas_plugin_gb10.probe:probe",
            kernel_roots=(KernelRoot("atlas_plugin_gb10"),),
            implementations="atlas_plugin_gb10.implementations:implementations",
        )


gb10 = Gb10()
