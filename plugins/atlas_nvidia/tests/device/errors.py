"""What a GPU's failures say, on the GPU of this machine: python errors.py.

Each failure is made in a process of its own, since some of them leave a context that nothing can use any more. Exits with 1 unless
every message names the kernel, its geometry and its arguments, and the lost context stays lost.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping

from conformance import library

from atlas_core.contracts.backend import GpuBackend, Launch
from atlas_core.vocab.errors import AtlasError, BudgetError, DeviceError, KernelError
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, i64, ptr
from atlas_nvidia.backend import open_backend

WILD = 0x1000
"""An address that nothing is mapped at."""
BLOCKS = 1 << 20


def reader(gpu: GpuBackend, geometry: Geometry, memory: int, attrs: LaunchAttrs | None = None) -> Launch:
    """A kernel that reads 1,024 vectors from ``memory``."""
    return gpu.prepare_launch(
        gpu.kernel("measure", "read_stream"), geometry, [ptr(memory), i64(1024), ptr(memory)], attrs
    )


def said(error: AtlasError, *words: str) -> list[str]:
    """The words that its message lacks."""
    print(f"  {type(error).__name__}: {error}")
    return [f"the message lacks {word!r}" for word in words if word not in str(error)]


def geometry(gpu: GpuBackend) -> list[str]:
    """A block that is too large is refused before the driver sees it."""
    try:
        reader(gpu, Geometry((1, 1, 1), (2048, 1, 1)), gpu.alloc(1 << 14))
    except KernelError as error:
        return said(error, "read_stream of measure", "2048 threads")
    return ["2048 threads a block were accepted"]


def launch(gpu: GpuBackend) -> list[str]:
    """What only the driver can refuse names kernel, geometry and arguments, and leaves the context usable."""
    memory = gpu.alloc(1 << 14)
    many = reader(gpu, Geometry((BLOCKS, 1, 1), (1024, 1, 1)), memory, LaunchAttrs(cooperative=True))
    stream = gpu.create_stream()
    try:
        gpu.enqueue(many, stream)
    except DeviceError as error:
        gpu.enqueue(reader(gpu, Geometry((1, 1, 1), (1024, 1, 1)), memory), stream)
        gpu.synchronize(stream)
        found = said(error, "read_stream of measure", str(BLOCKS), f"{memory:#x}", "CUDA_ERROR_")
        return [*found, *(["it is sticky"] if error.sticky else [])]
    return ["more cooperative blocks than there is room for were accepted"]


def wild(gpu: GpuBackend) -> list[str]:
    """A read of nowhere is sticky, and stays."""
    stream = gpu.create_stream()
    found = []
    gpu.enqueue(reader(gpu, Geometry((1, 1, 1), (1024, 1, 1)), WILD), stream)
    for attempt in (lambda: gpu.synchronize(stream), lambda: gpu.alloc(1)):
        try:
            attempt()
        except DeviceError as error:
            found += said(error, "CUDA_ERROR_ILLEGAL_ADDRESS", "restart the engine")
            found += [] if error.sticky else ["it is not sticky"]
        else:
            found.append("nothing was raised")
    return found


def memory(gpu: GpuBackend) -> list[str]:
    """Memory that is not there."""
    try:
        gpu.alloc(1 << 50)
    except BudgetError as error:
        return said(error, str(1 << 50), "lower")
    return ["a pebibyte was given"]


PARTS: Mapping[str, Callable[[GpuBackend], list[str]]] = {
    "geometry": geometry, "launch": launch, "wild": wild, "memory": memory,
}  # fmt: skip


def main(parts: list[str]) -> int:
    """All parts, each in a process of its own, or the one that is named in this process."""
    if parts:
        gpu = open_backend(library())
        found = PARTS[parts[0]](gpu)
        gpu.close()
        print("\n".join(f"  WRONG: {text}" for text in found))
        return 1 if found else 0
    failed = 0
    for name in PARTS:
        print(f"{name}:", flush=True)
        failed += subprocess.run([sys.executable, __file__, name], check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
