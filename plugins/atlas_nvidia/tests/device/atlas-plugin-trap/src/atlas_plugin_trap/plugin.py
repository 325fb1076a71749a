"""The machine ``trap``."""

from atlas_core.contracts.declarations import GpuBackendDecl, KernelRoot
from atlas_core.hookspecs import hookimpl


class Trap:
    """Hardware ``trap`` extends ``nvidia``, and has one kernel that fails when it is told to."""

    @hookimpl
    def atlas_gpu_backend(self) -> GpuBackendDecl:
        """The machine; it is served only when it is asked for."""
        return GpuBackendDecl(
            hardware="trap",
            backend="atlas_nvidia.backend:open_backend",
            probe="atlas_plugin_trap.implementations:probe",
            kernel_roots=(KernelRoot("atlas_plugin_trap"),),
            implementations="atlas_plugin_trap.implementations:implementations",
        )


trap = Trap()
