"""Products, attention and packings have the same bits on every processor: programs for each architecture, run here or by qemu."""

import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import atlas_core.kernels
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_plugin_cpu.archs import ARCHS
from atlas_plugin_cpu.machine import missing_features
from atlas_plugin_cpu.packing import MATRIX_LAYOUTS, pack

HERE = Path(__file__).parent
INCLUDES = (
    HERE.parent / "src/atlas_plugin_cpu/kernels/cpu/common",
    Path(atlas_core.kernels.__file__).parent / "include",
)
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-w")
LINES = 9 * 16 * (1 + 3 + 37) + 3 * 40 * (1 + 23)
"""Block formats, columns of a group, rows; heads, their dimensions, tokens."""
BLOCKS = {
    "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q4_k": (256, 144), "q5_k": (256, 176),
    "q6_k": (256, 210), "iq4_xs": (256, 136),
}  # fmt: skip
FOREIGN = [name for name, arch in ARCHS.items() if arch.machine == "aarch64"]
OWN = [name for name, arch in ARCHS.items() if arch.machine == "x86_64"]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ZIG = (sys.executable, "-m", "ziglang")
# Of the file that stands in for a C library.
ALONE = ("-ffreestanding", "-fno-builtin", "-fno-stack-protector")


def built(arch: str, folder: Path, name: str = "products.cpp") -> Path:
    """A program for ``arch``: by g++ for this machine, by zig, and without its C library, for another."""
    known, program, source = ARCHS[arch], folder / arch, HERE / "emulated" / name
    sources = [*FLAGS, *(f"-I{path}" for path in INCLUDES), "-c", str(source), "-o", f"{program}.o"]
    if known.machine == platform.machine() and shutil.which("g++"):
        steps = [["g++", *known.flags, *sources], ["g++", f"{program}.o", "-lm", "-o", str(program)]]
    else:
        zig = [*ZIG, "c++", "-target", f"{known.machine}-linux-musl", f"-mcpu={known.zig}"]
        steps = [
            [*zig, *sources],
            [*zig, "-std=c++17", "-O2", *ALONE, "-c", str(source.with_name("alone.cpp")), "-o", f"{program}-alone.o"],
            [*ZIG, "ld.lld", "-static", f"{program}.o", f"{program}-alone.o", "-o", str(program)],
        ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return program


def written(program: Path) -> bytes:
    """What a program writes, run here or by qemu."""
    emulator = ["qemu-aarch64", "-cpu", "max"] if ARCHS[program.name].machine == "aarch64" else []
    return subprocess.run([*emulator, str(program)], capture_output=True, check=True).stdout


def made_up(count: int, state: int) -> tuple[bytes, int]:
    """Bytes of the generator that the programs have, and its next state."""
    found = bytearray(count)
    for index in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        found[index] = state >> 24
    return bytes(found), state


@cache
def packed_by_numpy() -> bytes:
    """What packed.cpp has to write."""
    found, state = [], 1
    for name in MATRIX_LAYOUTS:
        layout = StorageLayout(name, *BLOCKS[name]) if name in BLOCKS else plain(DType(name))
        shape = (75, 3 * layout.block if name in BLOCKS else 27)
        data, state = made_up(layout.nbytes(shape), state)
        found.append(pack(f"{name}_x16", layout, shape, data))
    return np.concatenate(found).tobytes()


@pytest.fixture(scope="module")
def least(tmp_path_factory):
    """The program for the least x86-64 architecture."""
    if missing := missing_features("x86-64-v3"):
        pytest.skip(f"needs an instruction set: {', '.join(missing)}")
    return built("x86-64-v3", tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def expected(least):
    return written(least)


@pytest.mark.parametrize("arch", OWN)
def test_products_have_the_same_bits_here(arch, least, expected, tmp_path):
    if missing := missing_features(arch):
        pytest.skip(f"needs an instruction set: {', '.join(missing)}")
    assert expected.count(b"\n") == LINES
    assert written(least if arch == least.name else built(arch, tmp_path)) == expected


@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64")
@pytest.mark.parametrize("arch", FOREIGN)
def test_products_have_the_same_bits_on_another_machine(arch, expected, tmp_path):
    assert written(built(arch, tmp_path)) == expected


@pytest.mark.parametrize("arch", OWN)
def test_packings_have_the_same_bytes_here(arch, tmp_path):
    if missing := missing_features(arch):
        pytest.skip(f"needs an instruction set: {', '.join(missing)}")
    assert written(built(arch, tmp_path, "packed.cpp")) == packed_by_numpy()


@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64")
@pytest.mark.parametrize("arch", FOREIGN)
def test_packings_have_the_same_bytes_on_another_machine(arch, tmp_path):
    assert written(built(arch, tmp_path, "packed.cpp")) == packed_by_numpy()
