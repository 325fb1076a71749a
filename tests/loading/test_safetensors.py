import json
import struct
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas_core.loading.files import RangeFile
from atlas_core.loading.safetensors import read_header
from atlas_core.vocab.errors import CheckpointError


def entry(start, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def pack(header, data, spaces=0):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * spaces
    return struct.pack("<Q", len(text)) + text + data


A = entry(0, 8)
WHOLE = pack({"a": A}, bytes(8))


@pytest.fixture
def header(tmp_path):
    def read(data):
        path = tmp_path / "model.safetensors"
        path.write_bytes(data)
        with closing(RangeFile(path)) as file:
            return read_header(file)

    return read


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "header is too small: 0 bytes"),
        (bytes(7), "header is too small: 7 bytes"),
        (WHOLE[:20], "header length is invalid: 69 bytes are expected, the file has 20; the file is cut"),
        (struct.pack("<Q", 200 << 20), "header is too large: it claims 209715200"),
        (struct.pack("<Q", 1 << 63), "header is too large: it claims 9223372036854775808"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4711\n",
            "looks like a git-lfs pointer for a file of 4711 bytes",
        ),
        (b"<!DOCTYPE html><html>", "looks like a web page"),
        (WHOLE[:-2], "not fully covered: 77 bytes are expected, it has 75; the file is cut"),
        (WHOLE + bytes(2), "not fully covered: 77 bytes are expected, it has 79; bytes follow"),
        (pack({"a": A, "b": entry(4, 8, (1,))}, bytes(8)), "invalid offset: 'b' starts at 4"),
        (pack({"a": A, "b": A}, bytes(8)), "invalid offset"),
        (
            pack({"a": entry(0, 4, (1,)), "b": entry(8, 12, (1,))}, bytes(12)),
            "'b' starts at 8 of the data, and 'a' ends at 4",
        ),
        (pack({"a": entry(8, 0)}, bytes(8)), "invalid offset: 'a' ends at 0"),
        (
            pack({"a": entry(0, 8, (3,))}, bytes(8)),
            "invalid shape, dtype or offset: 'a' has 8 bytes, and F32 [3] needs 12",
        ),
        (pack({"a": entry(0, 8, (1 << 40, 1 << 40))}, bytes(8)), "overflow"),
        (pack({"a": entry(0, 8, dtype="F5_E2M2")}, bytes(8)), "unknown variant"),
        (pack({"a": entry(0, 1, (3,), "F4")}, bytes(1)), "needs 1.5"),
        (pack({"a": A, "__metadata__": {"x": 1}}, bytes(8)), "__metadata__"),
        (pack(b'{"a": %b, "a": %b}' % ((json.dumps(A).encode(),) * 2), bytes(8)), "the key 'a' twice"),
        (pack(b'{"a"', bytes(8)), "invalid JSON"),
        (pack(b'{"a": "\xff"}', bytes(8)), "invalid JSON"),
        (pack(b"[" * 100000, b""), "does not begin with"),
        (pack(b'{"a":' + b"[" * 100000, b""), "invalid JSON"),
        (pack({"a": {**A, "extra": 1}}, bytes(8)), "exactly dtype, shape and data_offsets"),
        (pack({"a": {**A, "shape": [2.0]}}, bytes(8)), "not a list of sizes"),
        (pack({"a": {**A, "shape": [True, 2]}}, bytes(8)), "not a list of sizes"),
        (pack({"a": {**A, "data_offsets": [0]}}, bytes(8)), "not two positions"),
    ],
)
def test_refused(header, data, said, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        header(data)
    assert str(tmp_path / "model.safetensors") in caught.value.what
    assert said in caught.value.why


@pytest.mark.parametrize(
    ("data", "shapes"),
    [
        (WHOLE, {"a": (2,)}),
        (pack({"a": entry(0, 4, ())}, bytes(4)), {"a": ()}),
        (pack({"a": entry(0, 0, (0, 4))}, b""), {"a": (0, 4)}),
        (pack({"a": A}, bytes(8), spaces=5), {"a": (2,)}),
        (pack({"a": A, "z": entry(0, 0, (0,)), "__metadata__": {"format": "pt"}}, bytes(8)), {"a": (2,), "z": (0,)}),
        (pack({"b": entry(4, 8, (1,)), "a": entry(0, 4, (1,))}, bytes(8)), {"a": (1,), "b": (1,)}),
        (pack({"a": entry(0, 2, (4,), "F4")}, bytes(2)), {"a": (4,)}),
        (pack({}, b""), {}),
    ],
)
def test_accepted(header, data, shapes):
    assert {name: tensor.shape for name, tensor in header(data).items()} == shapes


def test_positions_are_those_of_the_file(header, tmp_path):
    values = np.arange(5, dtype=np.float32)
    stored = header(pack({"b": entry(8, 20, (3,)), "a": entry(0, 8)}, values.tobytes()))["b"]
    whole = (tmp_path / "model.safetensors").read_bytes()
    assert np.frombuffer(whole[stored.start : stored.end], np.float32).tolist() == [2, 3, 4]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_a_checkpoint_error_or_harmless(header, data):
    whole = bytearray(pack({"a": A, "b": entry(8, 12, (1, 1))}, bytes(12)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole)))) :]
    try:
        found = header(bytes(whole))
    except CheckpointError:
        return
    assert sum(tensor.end - tensor.start for tensor in found.values()) <= 12
