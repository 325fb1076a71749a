"""Products and attention have the same bits on every processor: one program, built for each architecture, run here or by qemu."""

import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import atlas_core.kernels
from atlas_plugin_cpu.archs import ARCHS
from atlas_plugin_cpu.machine import missing_features

HERE = Path(__file__).parent
SOURCE = HERE / "emulated" / "products.cpp"
INCLUDES = (
    HERE.parent / "src/atlas_plugin_cpu/kernels/cpu/common",
    Path(atlas_core.kernels.__file__).parent / "include",
)
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-w")
LINES = 9 * 16 * (1 + 3 + 21) + 3 * 40 * (1 + 23)
"""Block formats, columns of a group, rows; heads, their dimensions, tokens."""
FOREIGN = [name for name, arch in ARCHS.items() if arch.machine == "aarch64"]
OWN = [name for name, arch in ARCHS.items() if arch.machine == "x86_64"]


ZIG = (sys.executable, "-m", "ziglang", "c++")


def printed(arch: str, folder: Path) -> str:
    """What the program prints, built for ``arch``: by g++ for this machine, by zig for another."""
    known, program = ARCHS[arch], folder / arch
    sources = [*FLAGS, *(f"-I{path}" for path in INCLUDES), "-c", str(SOURCE), "-o", f"{program}.o"]
    if known.machine == platform.machine() and shutil.which("g++"):
        steps = [["g++", *known.flags, *sources], ["g++", f"{program}.o", "-lm", "-o", str(program)]]
    else:
        # One C library for all processors of a machine: zig builds it, which takes a while.
        target = ["-target", f"{known.machine}-linux-musl"]
        steps = [
            [*ZIG, *target, f"-mcpu={known.zig}", *sources],
            [*ZIG, *target, "-static", f"{program}.o", "-o", str(program)],
        ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    emulator = ["qemu-aarch64", "-cpu", "max"] if known.machine == "aarch64" else []
    return subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What the least x86-64 architecture prints."""
    if missing := missing_features("x86-64-v3"):
        pytest.skip(f"needs an instruction set: {', '.join(missing)}")
    return cache(lambda: printed("x86-64-v3", tmp_path_factory.mktemp("built")))()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", OWN)
def test_products_have_the_same_bits_here(arch, expected, tmp_path):
    if missing := missing_features(arch):
        pytest.skip(f"needs an instruction set: {', '.join(missing)}")
    assert expected.count("\n") == LINES
    assert printed(arch, tmp_path) == expected


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64")
@pytest.mark.parametrize("arch", FOREIGN)
def test_products_have_the_same_bits_on_another_machine(arch, expected, tmp_path):
    assert printed(arch, tmp_path) == expected
