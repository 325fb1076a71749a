"""Toy kernels through nvcc, where there is one; reading its report needs none."""

import pytest

from atlas_core.kernels.build import Builder, Selection, jobs
from atlas_core.kernels.library import KernelLibrary
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.target import Target
from atlas_nvidia.toolchain import NvidiaComputeTarget, read_report

ENTRY = (
    '[[entry]]\nname = "scale"\nmodule = "scale"\nparams = ["ptr<const float> x", "ptr<__nv_bfloat16> y", "i32 n"]\n'
)
BODY = """extern "C" __global__ void scale(const float* x, __nv_bfloat16* y, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) y[threadIdx.x] = __float2bfloat16(tile[63 - threadIdx.x]);
}
"""
FILES = {
    "machine/toy/HARDWARE.toml": '[hardware]\nname = "toy"\nvendor = "nvidia"\narchs = ["sm_90a", "sm_121a"]\n',
    "machine/toy/common/KERNEL.toml": '[[module]]\nname = "scale"\nsource = "scale.cu"\n' + ENTRY,
    "machine/toy/common/scale.cu": BODY,
}
REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 8 bytes cumulative stack size, 256 bytes smem
ptxas info    : Function properties for helper
    0 bytes stack frame, 16 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
x.cu(3): warning #177-D: variable "n" was declared but never referenced
"""


def build(tree, places, arch):
    target = NvidiaComputeTarget()
    try:
        target.find_compiler()
    except KernelError:
        pytest.skip("needs nvcc")
    builder = Builder(tree, places, {"nvidia": target})
    return [built for job in jobs(tree, {"nvidia": target}, Selection(archs=(arch,))) for built in builder.build(job)]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_121a"])
def test_a_cubin_is_built_with_its_resources(make_tree, arch):
    tree, places = make_tree(FILES)
    assert [(built.module, built.state) for built in build(tree, places, arch)] == [("scale", "built")]
    kernel = KernelLibrary(tree, places, Target("toy", arch)).find("scale", "scale")
    assert kernel.path.read_bytes()[:4] == b"\x7fELF"
    assert kernel.shared is not None
    assert kernel.shared >= 256
    assert kernel.registers is not None
    assert 0 < kernel.registers < 64
    assert kernel.spills == 0
    assert [built.state for built in build(tree, places, arch)] == ["kept"]


@pytest.mark.parametrize("prefix", ['extern "C" ', ""])
def test_a_shadow_with_another_signature_is_refused_and_the_entry_is_named(make_tree, prefix):
    wrong = BODY.replace('extern "C" ', prefix).replace("__nv_bfloat16* y", "float* y").replace("__float2bfloat16", "")
    tree, places = make_tree(FILES | {
        "model/toy/llama/bf16/KERNEL.toml": "[shadows]\nscale = 'float out'\n", "model/toy/llama/bf16/scale.cu": wrong
    })  # fmt: skip
    with pytest.raises(KernelError, match="scale"):
        build(tree, places, "sm_90a")


def test_the_report_of_ptxas_is_read():
    report = read_report(REPORT)
    assert report.registers == {"first": 168, "second": 10}
    assert report.spills == {"first": 12, "helper": 16, "second": 0}
    assert report.shared == {"first": 256, "second": 0}
    assert report.log == 'x.cu(3): warning #177-D: variable "n" was declared but never referenced'


def test_nvcc_is_found_where_cuda_home_says_or_that_place_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(KernelError, match=f"the variable CUDA_HOME says {tmp_path}"):
        NvidiaComputeTarget().find_compiler()


def test_a_prototype_brings_the_headers_of_its_types():
    text = NvidiaComputeTarget().prototype("f", [("ptr<const __half>", "x"), ("ptr", "out"), ("f32", "eps")])
    assert text.splitlines() == [
        "#include <cuda_fp16.h>",
        "#include <stdint.h>",
        'extern "C" __global__ void f(const __half* x, void* out, float eps);'
    ]  # fmt: skip


@pytest.mark.parametrize("arch", ["native", "90a", "sm_9", "compute_90a"])
def test_what_is_no_architecture_is_refused(arch):
    with pytest.raises(KernelError, match="not a CUDA architecture"):
        NvidiaComputeTarget().resolve_arch(arch)
