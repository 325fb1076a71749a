"""Kernels that the last start looked up, found again without reading what declares and records them."""

from collections.abc import Callable, Iterable, Mapping

from atlas_core.kernels.library import CompiledKernel, KernelLibrary
from atlas_core.vocab.target import Target


class KeptLibrary(KernelLibrary):
    """A library that looks into the kernel tree only for what was not kept."""

    def __init__(
        self, target: Target, kept: Iterable[CompiledKernel], digest: str, whole: Callable[[], KernelLibrary]
    ) -> None:
        """``digest`` is the library's; ``whole`` reads it."""
        self.target = target
        self._kept = {(kernel.module, kernel.entry): kernel for kernel in kept}
        self._digest = digest
        self._make = whole
        self._made: KernelLibrary | None = None

    def find(self, module: str, entry: str, op: str = "") -> CompiledKernel:
        """See KernelLibrary."""
        return self._kept.get((module, entry)) or self._whole.find(module, entry, op)

    def found(self) -> tuple[CompiledKernel, ...]:
        """See KernelLibrary."""
        return (*self._kept.values(), *(self._made.found() if self._made else ()))

    def modules(self) -> tuple[tuple[str, str], ...]:
        """See KernelLibrary."""
        return self._whole.modules()

    def stale(self) -> Mapping[str, str]:
        """See KernelLibrary."""
        return self._whole.stale()

    def digest(self) -> str:
        """See KernelLibrary."""
        return self._digest

    @property
    def _whole(self) -> KernelLibrary:
        if self._made is None:
            self._made = self._make()
        return self._made
