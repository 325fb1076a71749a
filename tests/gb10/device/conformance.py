# ruff: noqa: T201 -- a script that prints
"""The kernels of gb10 on the GPU of this machine: python conformance.py [FILTER].

On a GB10 this is the machine's own proof. On an H100 or H200 the same tree, compiled for sm_90a, runs with twins in place of the
instructions that Hopper lacks: everything but those is proved there. Compiles what is stale, so it needs nvcc, or binaries of the
same sources in place. Exits with 1 unless everything passed.
"""

import sys

import numpy as np

from atlas_core.conformance.codecs import plain_codec
from atlas_core.conformance.run import Options, Subject, test
from atlas_core.contracts.backend import GpuBackend
from atlas_core.contracts.declarations import KernelRoot
from atlas_core.contracts.ops import OpImplementation
from atlas_core.kernels.build import Builder, Job
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.kernels.tree import COMMON
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, i64, ptr
from atlas_core.vocab.target import Target
from atlas_nvidia import implementations as baseline
from atlas_nvidia.backend import open_backend
from atlas_nvidia.driver import device
from atlas_nvidia.fused import fused_ops
from atlas_nvidia.toolchain import NvidiaComputeTarget
from atlas_plugin_gb10 import implementations as own

AT_ONCE = 1 << 28
"""Floats converted by one launch: 1 GiB."""
GEOMETRY = Geometry((1024, 1, 1), (256, 1, 1))


def opened(arch: str) -> GpuBackend:
    """This machine's GPU with the kernels of gb10."""
    tree, places = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_gb10")])
    library = KernelLibrary(tree, places, Target("gb10", arch))
    if library.stale():
        Builder(tree, places, {"nvidia": NvidiaComputeTarget()}).build(Job("gb10", arch, COMMON))
        library = KernelLibrary(tree, places, Target("gb10", arch))
    return open_backend(library)


def implementations() -> list[OpImplementation]:
    """What the machine inherits, replaced by name as the assembly does."""
    return list({i.name: i for i in (*baseline.implementations(), *own.implementations())}.values())


def converted(gpu: GpuBackend, entry: str, source: np.ndarray, nbytes: int) -> np.ndarray:
    """``source`` through an entry of nvfp4_convert, ``nbytes`` of results."""
    given, made = gpu.alloc(source.nbytes), gpu.alloc(nbytes)
    result = np.empty(nbytes, np.uint8)
    pairs = source.nbytes if source.dtype == np.uint8 else source.size // 2
    args: list[Arg] = [ptr(given), ptr(made), i64(pairs)]
    stream = gpu.create_stream()
    gpu.copy_h2d(source.data.cast("B"), given)
    gpu.enqueue(gpu.prepare_launch(gpu.kernel("nvfp4_convert", entry), GEOMETRY, args), stream)
    gpu.synchronize(stream)
    gpu.copy_d2h(made, result.data)
    gpu.free(given)
    gpu.free(made)
    return result


def twins_agree(gpu: GpuBackend) -> bool:
    """Whether each conversion and its twin give the same bits for all floats, and for all bytes of codes."""
    codes = np.arange(256, dtype=np.uint8)
    differing = int(
        (converted(gpu, "e2m1_decode", codes, 1024) != converted(gpu, "e2m1_decode_twin", codes, 1024)).sum()
    )
    for start in range(0, 1 << 32, AT_ONCE):
        bits = np.arange(start, start + AT_ONCE, dtype=np.uint32)
        native, twin = (converted(gpu, entry, bits, AT_ONCE // 2) for entry in ("e2m1_encode", "e2m1_encode_twin"))
        differing += int((native != twin).sum())
    print(f"e2m1: {differing} differing bytes over all 2^32 floats and all 256 bytes of codes")
    return differing == 0


def main(text: str) -> int:
    """Run the trials whose id contains ``text``; 0 when everything passed."""
    arch = device(0).arch
    gpu = opened(arch)
    print(gpu.facts())
    try:
        ok = twins_agree(gpu)
        options = Options(text, (DType.BF16,), (plain_codec(DType.BF16), plain_codec(DType.F32)))
        report = test(Subject(gpu, implementations(), arch, "fast", fused_ops()), options)
        print(report.table())
        return 0 if ok and not report.failures and not report.lost else 1
    finally:
        gpu.close()


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
