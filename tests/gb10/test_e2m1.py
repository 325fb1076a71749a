"""The twins of sm12x.cuh on this CPU: all 2^32 floats into e2m1, all bytes of codes out of it."""

import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import atlas_plugin_gb10
from atlas_plugin_cpu.toolchain import CpuComputeTarget

HERE = Path(__file__).parent
HEADERS = Path(atlas_plugin_gb10.__file__).parent / "kernels/gb10/common"
INFINITY = 0x7F800000

# Where zig is the compiler, its first program waits for its C++ library to be built.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[list[str]]:
    """The words of each line that e2m1_host.cpp prints; it takes some ten seconds."""
    program = tmp_path_factory.mktemp("e2m1") / "host"
    command = [*CpuComputeTarget().find_compiler().command, "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-I", HEADERS, HERE / "e2m1_host.cpp", "-o", program], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [line.split() for line in said.splitlines()]


def e2m1(bits: np.ndarray) -> np.ndarray:
    """The codes of floats given by their bits, by ml_dtypes; NaN, which e2m1 lacks, becomes +6 as PTX defines it."""
    nan = bits & 0x7FFFFFFF > INFINITY
    codes = np.where(nan, np.uint32(0), bits).view(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(nan, 7, codes)


def test_every_float_gets_the_nearest_code(answers):
    runs = [(int(bits, 16), int(code, 16)) for what, bits, code in (a for a in answers if a[0] == "encode")]
    starts = np.array([start for start, _ in runs], np.uint32)
    codes = np.array([code for _, code in runs], np.uint8)
    assert starts[0] == 0
    # Rounding is monotonic in each sign's finite floats and constant in its NaNs, so equality at both ends of a run that
    # holds no border between those classes is equality in all of it.
    borders = np.array([INFINITY, INFINITY + 1, 0x80000000, 0x80000000 + INFINITY, 0x80000001 + INFINITY], np.uint32)
    points = np.unique(np.concatenate([starts, starts[1:] - 1, borders, borders - 1, [0xFFFFFFFF]])).astype(np.uint32)
    found = codes[np.searchsorted(starts, points, side="right") - 1]
    assert found.tolist() == e2m1(points).tolist()
    assert len(runs) == 17  # eight codes of each sign, and the NaNs of the negative sign


def test_random_floats_agree_as_well(answers):
    """Does not rest on monotonicity."""
    starts = np.array([int(a[1], 16) for a in answers if a[0] == "encode"], np.uint32)
    codes = np.array([int(a[2], 16) for a in answers if a[0] == "encode"], np.uint8)
    draws = np.random.default_rng(0)
    near = draws.uniform(-8, 8, 1 << 20).astype(np.float32).view(np.uint32)
    bits = np.concatenate([draws.integers(0, 1 << 32, 1 << 20, dtype=np.uint32), near])
    assert np.array_equal(codes[np.searchsorted(starts, bits, side="right") - 1], e2m1(bits))


def test_both_halves_of_a_byte_are_alike(answers):
    assert [a[1] for a in answers if a[0] == "disagree"] == ["0"]


def test_every_byte_of_codes_decodes_to_its_values(answers):
    told = {int(byte, 16): int(pair, 16) for what, byte, pair in (a for a in answers if a[0] == "decode")}
    assert sorted(told) == list(range(256))
    pairs = np.array([told[byte] for byte in range(256)], np.uint32).view(np.float16).reshape(256, 2)
    byte = np.arange(256, dtype=np.uint8)
    codes = np.stack([byte & 15, byte >> 4], 1).view(ml_dtypes.float4_e2m1fn)
    # As bits: the sign of zero counts.
    assert np.array_equal(pairs.view(np.uint16), codes.astype(np.float16).view(np.uint16))
