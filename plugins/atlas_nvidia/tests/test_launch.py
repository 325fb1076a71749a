"""Packing of arguments, and what is refused before the driver is asked."""

import ctypes
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.vocab.errors import KernelError, ResidencyError
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, Param, TensorMap, f32, i32, i64, ptr, tensor_map, u32
from atlas_nvidia.launch import Limits, PackedArguments, check_arguments, check_geometry, check_residency

FORMATS = {"ptr": "<Q", "i32": "<i", "u32": "<I", "i64": "<q", "f32": "<f"}
LIMITS = Limits(1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535), 227 * 1024, 8)
ARGS = st.one_of(
    st.integers(0, 2**64 - 1).map(ptr),
    st.integers(-(2**31), 2**31 - 1).map(i32),
    st.integers(0, 2**32 - 1).map(u32),
    st.integers(-(2**63), 2**63 - 1).map(i64),
    st.floats(width=32, allow_nan=False).map(f32),
)


@settings(deadline=None)
@given(st.lists(ARGS, max_size=20))
def test_the_driver_finds_every_value_behind_its_pointer(args: list[Arg]) -> None:
    packed = PackedArguments(args, encode=lambda matrix: (0, matrix))
    pointers = (ctypes.c_uint64 * max(len(args), 1)).from_address(packed.address)
    for pointer, arg in zip(pointers, args, strict=False):
        layout = FORMATS[arg.kind]
        raw = ctypes.string_at(pointer, struct.calcsize(layout))
        assert struct.unpack(layout, raw)[0] == arg.value


def test_a_matrix_is_given_as_the_driver_describes_it() -> None:
    matrix = TensorMap(1 << 20, (64, 128), (32, 64), 2)
    seen = []

    def encode(given: TensorMap) -> tuple[int, object]:
        seen.append(given)
        return 0xABC0, given

    packed = PackedArguments([i32(7), tensor_map(matrix)], encode)
    assert seen == [matrix]
    assert (ctypes.c_uint64 * 2).from_address(packed.address)[1] == 0xABC0


def test_arguments_that_fit_are_taken() -> None:
    check_arguments(
        "k",
        [Param("ptr", "x", "float"), Param("i32", "n"), Param("f32", "eps"), Param("map", "w")],
        [ptr(8), i32(-1), f32(1e-5), tensor_map(TensorMap(1 << 20, (64, 128), (32, 64), 2))],
    )


@pytest.mark.parametrize(
    ("params", "args", "words"),
    [
        ([Param("ptr", "x"), Param("i32", "n")], [ptr(0)], "takes 2 arguments and got 1"),
        ([Param("i32", "n")], [f32(1.0)], "n of k is i32"),
        ([Param("i32", "n")], [i32(2**31)], "2147483648 does not fit"),
        ([Param("u32", "n")], [u32(-1)], "-1 does not fit"),
        ([Param("ptr", "x", "const float")], [ptr(-8)], "x of k is ptr<const float>"),
        ([Param("map", "w")], [Arg("map", 16)], "its matrix is None"),
        ([Param("map", "w")], [tensor_map(TensorMap(8, (64, 128), (32, 64), 2))], "at 0x8"),
        ([Param("map", "w")], [tensor_map(TensorMap(16, (64, 12), (32, 64), 2))], "rows of 24 bytes"),
        ([Param("map", "w")], [tensor_map(TensorMap(16, (64, 128), (32, 16), 8))], "elements have 8 bytes"),
        ([Param("map", "w")], [tensor_map(TensorMap(16, (64, 128), (257, 64), 2))], "a box of (257, 64)"),
        ([Param("map", "w")], [tensor_map(TensorMap(16, (64, 128), (32, 32), 2))], "a row of a box has 128 bytes"),
    ],
)
def test_arguments_that_do_not_fit_are_named(params: list[Param], args: list[Arg], words: str) -> None:
    with pytest.raises(KernelError) as caught:
        check_arguments("k", params, args)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("geometry", "attrs", "words"),
    [
        (Geometry((1, 1, 1), (2048, 1, 1)), LaunchAttrs(), "2048 threads a block, at most 512"),
        (Geometry((1, 1, 1), (1, 1, 128)), LaunchAttrs(), "block (1, 1, 128)"),
        (Geometry((0, 1, 1), (32, 1, 1)), LaunchAttrs(), "grid (0, 1, 1)"),
        (Geometry((1, 65536, 1), (32, 1, 1)), LaunchAttrs(), "grid (1, 65536, 1)"),
        (Geometry((1, 1, 1), (32, 1, 1), 227 * 1024), LaunchAttrs(), "bytes of shared memory"),
        (Geometry((16, 1, 1), (32, 1, 1)), LaunchAttrs(cluster=(16, 1, 1)), "clusters of (16, 1, 1)"),
        (Geometry((9, 1, 1), (32, 1, 1)), LaunchAttrs(cluster=(8, 1, 1)), "no multiple of the cluster"),
    ],
)
def test_geometry_beyond_the_device_is_refused(geometry: Geometry, attrs: LaunchAttrs, words: str) -> None:
    with pytest.raises(KernelError) as caught:
        check_geometry("k", geometry, attrs, LIMITS, threads=512, static=256)
    assert words in str(caught.value)


def test_geometry_at_the_limits_is_taken() -> None:
    attrs = LaunchAttrs(overlap=True, cluster=(8, 1, 1))
    check_geometry("k", Geometry((16, 65535, 1), (512, 1, 1), 227 * 1024 - 256), attrs, LIMITS, threads=512, static=256)


def test_clusters_that_wait_for_each_other_must_all_have_room() -> None:
    geometry = Geometry((112, 1, 1), (448, 1, 1), 0)
    check_residency("k", geometry, (16, 1, 1), 7)
    with pytest.raises(ResidencyError, match="7 clusters of 16 blocks") as caught:
        check_residency("k", geometry, (16, 1, 1), 6)
    assert caught.value.why == "this device runs 6 at once"
