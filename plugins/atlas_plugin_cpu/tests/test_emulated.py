"""Products and attention have the same bits on every processor: one program, built for each architecture, run here or by qemu."""

import platform
import shutil
import subprocess
import sys
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


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ZIG = (sys.executable, "-m", "ziglang")
# Of the file that stands in for a C library.
ALONE = ("-ffreestanding", "-fno-builtin", "-fno-stack-protector")


def built(arch: str, folder: Path) -> Path:
    """The program for ``arch``: by g++ for this machine, by zig, and without its C library, for another."""
    known, program = ARCHS[arch], folder / arch
    sources = [*FLAGS, *(f"-I{path}" for path in INCLUDES), "-c", str(SOURCE), "-o", f"{program}.o"]
    if known.machine == platform.machine() and shutil.which("g++"):
        steps = [["g++", *known.flags, *sources], ["g++", f"{program}.o", "-lm", "-o", str(program)]]
    else:
        zig = [*ZIG, "c++", "-target", f"{known.machine}-linux-musl", f"-mcpu={known.zig}"]
        steps = [
            [*zig, *sources],
            [*zig, "-std=c++17", "-O2", *ALONE, "-c", str(SOURCE.with_name("alone.cpp")), "-o", f"{program}-alone.o"],
            [*ZIG, "ld.lld", "-static", f"{program}.o", f"{program}-alone.o", "-o", str(program)],
        ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return program


def printed(program: Path) -> str:
    """What a program prints, run here or by qemu."""
    emulator = ["qemu-aarch64", "-cpu", "max"] if ARCHS[program.name].machine == "aarch64" else []
    return subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def least(tmp_path_factory):
    """The program for the least x86-64 architecture."""
    if missing := missing_features("x86-64-v3"):
        pytest.skip(f"needs an instruction set: {', '.join(missing)}")
    return built("x86-64-v3", tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def expected(least):
    return printed(least)


@pytest.mark.parametrize("arch", OWN)
def test_products_have_the_same_bits_here(arch, least, expected, tmp_path):
    if missing := missing_features(arch):
        pytest.skip(f"needs an instruction set: {', '.join(missing)}")
    assert expected.count("\n") == LINES
    assert printed(least if arch == least.name else built(arch, tmp_path)) == expected


@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64")
@pytest.mark.parametrize("arch", FOREIGN)
def test_products_have_the_same_bits_on_another_machine(arch, expected, tmp_path):
    assert printed(built(arch, tmp_path)) == expected
