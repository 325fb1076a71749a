"""A backend without a device that holds launches to what an H100 and the declarations allow."""

from msgspec.structs import replace

from atlas_core.contracts.backend import DeviceFacts
from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.scan import scan
from atlas_core.runtime.null import NullBackend, NullLaunch
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs
from atlas_nvidia.launch import Limits, check_arguments, check_geometry

H100 = Limits(1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535), 227 * 1024, 16)


class CheckingBackend(NullBackend):
    """Checks every launch as the real backend does; ``static`` bytes of shared memory are taken for the kernel's own."""

    def __init__(self, static: int) -> None:
        super().__init__()
        self.static = static
        tree, _ = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_hopper")])
        self.declared = {(u.module, entry.name): entry.params for u in tree.units("hopper") for entry in u.entries}

    def facts(self) -> DeviceFacts:
        """An H100's processors."""
        return replace(super().facts(), processors=132)

    def prepare_launch(
        self, kernel: tuple[str, str], geometry: Geometry, args: list[Arg], attrs: LaunchAttrs | None = None
    ) -> NullLaunch:
        """See GpuBackend."""
        check_arguments(str(kernel), self.declared[kernel], args)
        check_geometry(str(kernel), geometry, attrs or LaunchAttrs(), H100, 1024, self.static)
        return NullLaunch(*kernel, geometry, tuple(args), attrs or LaunchAttrs())
