"""What this distribution offers: the machine ``toy``."""

from atlas_core.contracts.declarations import GpuBackendDecl, KernelRoot
from atlas_core.hookspecs import hookimpl


class Toy:
    """Hardware ``toy``: HARDWARE.toml says that it extends ``cpu``, whose kernels and implementations it inherits."""

    @hookimpl
    def atlas_gpu_backend(self) -> GpuBackendDecl:
        """The machine. It is driven as the CPU is, so the CPU's backend will do."""
        return GpuBackendDecl(
            hardware="toy",
            backend="atlas_plugin_cpu.backend:open_backend",
            probe="atlas_plugin_toy.probe:probe",
            kernel_roots=(KernelRoot("atlas_plugin_toy"),),
            implementations="atlas_plugin_toy.implementations:implementations",
            bucketed=False,
        )


toy = Toy()
