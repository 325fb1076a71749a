"""Toy kernels through a real C++ compiler, called as the runtime calls them."""

import ctypes
import importlib.util
import platform
import shutil
import struct
import sys

import pytest

from atlas_core.kernels.build import Builder, Selection, jobs
from atlas_core.kernels.library import KernelLibrary
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.target import Target
from atlas_plugin_cpu.toolchain import CpuComputeTarget

ENTRY = """[[entry]]
name = "scale"
module = "scale"
params = ["ptr<const float> x", "ptr<float> y", "i32 n", "u32 shift", "i64 base", "f32 factor"]
"""
BODY = """#include "tune.h"
#include <math.h>
void scale(const float* x, float* y, int n, unsigned shift, int64_t base, float factor, int task, int ntasks) {
    for (int i = task; i < n; i += ntasks)
        y[i] = __builtin_fmaf(x[i], factor, (float)(base >> shift)) + sqrtf(TUNE) + (float)(ntasks - 3);
}
"""
FILES = {
    "machine/toy/HARDWARE.toml": "[hardware]\nname = 'toy'\nvendor = 'cpu'\narchs = ['native','x86-64-v3','aarch64']\n",
    "machine/toy/common/KERNEL.toml": '[[module]]\nname = "scale"\nsource = "scale.cpp"\n' + ENTRY
    + '[[instance]]\nname = "scale_16"\nmodule = "scale"\ndefines = { TUNE = 16 }\n',
    "machine/toy/common/scale.cpp": BODY,
    "machine/toy/common/tune.h": "#pragma once\n#ifndef TUNE\n#define TUNE 4\n#endif\n",
}  # fmt: skip


def compilers():
    found = {name: path for name in ("g++", "clang++") if (path := shutil.which(name))}
    if importlib.util.find_spec("ziglang") is not None:
        found["zig"] = f"{sys.executable} -m ziglang c++"
    return found


@pytest.fixture(params=compilers())
def compiler(request, monkeypatch):
    """Each C++ compiler of this machine, by way of $CXX."""
    monkeypatch.setenv("CXX", compilers()[request.param])
    return request.param


def build(tree, places, arch="native"):
    target = CpuComputeTarget()
    told = []
    builder = Builder(tree, places, {"cpu": target}, progress=told.append)
    for job in jobs(tree, {"cpu": target}, Selection(archs=(arch,))):
        builder.build(job)
    assert [built.log for built in told] == [""] * len(told)
    return {built.module: built.state for built in told}


def call(kernel, n=5, task=1, ntasks=3):
    """Run one task through the trampoline and give the values; what the task does not own stays -1."""
    x, y = (ctypes.c_float * n)(*range(n)), (ctypes.c_float * n)(*[-1.0] * n)
    low = struct.unpack("<I", struct.pack("<f", 0.5))[0]
    arguments = [ctypes.addressof(x), ctypes.addressof(y), n, 1, -6, low | 0xDEAD << 32]
    slots = (ctypes.c_uint64 * len(arguments))(*(value % 2**64 for value in arguments))
    function = ctypes.CDLL(str(kernel.path))[f"atlas_entry_{kernel.entry}"]
    function(slots, ctypes.c_int(task), ctypes.c_int(ntasks))
    return list(y)


def test_a_kernel_computes_through_its_trampoline_and_its_instance_differs(make_tree, compiler):
    tree, places = make_tree(FILES)
    assert build(tree, places) == {"scale": "built", "scale_16": "built"}
    library = KernelLibrary(tree, places, Target("toy", CpuComputeTarget().resolve_arch("native")))
    # y = 0.5 x + (-6 >> 1) + sqrt(TUNE), for every third element from the second
    assert call(library.find("scale", "scale")) == [-1.0, -0.5, -1.0, -1.0, 1.0]
    assert call(library.find("scale_16", "scale")) == [-1.0, 1.5, -1.0, -1.0, 3.0]


def test_a_changed_header_rebuilds_and_nothing_else_does(make_tree, compiler):
    tree, places = make_tree(FILES)
    build(tree, places)
    assert build(*make_tree(FILES)) == {"scale": "kept", "scale_16": "kept"}
    tree, places = make_tree({"machine/toy/common/tune.h": FILES["machine/toy/common/tune.h"].replace("4", "9")})
    assert build(tree, places) == {"scale": "built", "scale_16": "built"}
    library = KernelLibrary(tree, places, Target("toy", CpuComputeTarget().resolve_arch("native")))
    assert call(library.find("scale", "scale"))[1] == 0.5


@pytest.mark.parametrize(
    "wrong", [("const float* x", "const double* x"), ("void scale(", "void scales("), ("int n", "int64_t n")]
)
def test_a_shadow_with_another_signature_does_not_link_and_the_entry_is_named(make_tree, compiler, wrong):
    files = FILES | {
        "model/toy/llama/q4/KERNEL.toml": "[shadows]\nscale = 'unrolled'\n",
        "model/toy/llama/q4/scale.cpp": "// unrolled\n" + BODY.replace(*wrong),
    }
    tree, places = make_tree(files)
    with pytest.raises(KernelError) as caught:
        build(tree, places)
    assert "scale(float const*, float*, int, unsigned int, long, float, int, int)" in caught.value.why
    assert "llama/q4/scale.cpp" in caught.value.what


def test_a_kernel_may_use_no_cpp_library(make_tree, compiler):
    with pytest.raises(KernelError, match="'?vector'?"):
        build(*make_tree(FILES | {"machine/toy/common/scale.cpp": "#include <vector>\n" + BODY}))


def test_code_for_another_machine_needs_zig(make_tree, compiler):
    foreign = "x86-64-v3" if platform.machine() == "aarch64" else "aarch64"
    tree, places = make_tree(FILES)
    if compiler == "zig":
        assert build(tree, places, foreign) == {"scale": "built", "scale_16": "built"}
    else:
        with pytest.raises(KernelError, match="makes code for"):
            build(tree, places, foreign)


def test_native_is_named_after_the_processor_and_no_other_is_built_here(tmp_path):
    target = CpuComputeTarget()
    name = target.resolve_arch("native")
    assert name.startswith("native-")
    assert name == target.resolve_arch("native") == target.resolve_arch(name)
    with pytest.raises(KernelError, match="another machine's processor"):
        target.compile(
            target.find_compiler(), tmp_path / "x", tmp_path / "y", "native-00000000", (), (), tmp_path / "h"
        )
    with pytest.raises(KernelError, match="x86-64-v9"):
        target.resolve_arch("x86-64-v9")


def test_a_compiler_is_found_or_every_place_is_named(monkeypatch):
    target = CpuComputeTarget()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(KernelError, match="/nowhere/c"):
        target.find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelError, match="No C\\+\\+ compiler") as caught:
        target.find_compiler()
    assert "ziglang" in caught.value.cure


def test_a_parameter_may_not_take_the_names_of_the_abi():
    with pytest.raises(KernelError, match="'task'"):
        CpuComputeTarget().prototype("scale", [("i32", "task")])
