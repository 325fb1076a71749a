import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from atlas_core.contracts.quant import QuantFormat
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import TensorInfo
from atlas_quant_gguf.decode import DECODERS
from atlas_quant_gguf.encode import ENCODERS
from atlas_quant_gguf.formats import GgufFormat
from atlas_quant_gguf.ggml import BY_NAME

FORMAT: QuantFormat = GgufFormat()
NAMES = {"mxfp4_ggml": "MXFP4"}


@pytest.fixture(scope="module")
def goldens():
    """Rows of 512 weights quantised by ggml, and what ggml's own conversion makes of them."""
    return np.load(Path(__file__).parent / "data" / "gguf_quants.npz")


@pytest.mark.parametrize("layout", [name for name in DECODERS if name != "f32"])
def test_decoding_gives_ggml_s_bits(goldens, layout):
    name = NAMES.get(layout, layout.upper())
    values = FORMAT.decode(layout, goldens[f"{name}.bytes"].tobytes(), (8, 512))
    assert values.dtype == np.float32
    assert np.array_equal(values.view(np.uint32), goldens[f"{name}.f32"].view(np.uint32))


def test_every_layout_is_the_size_that_ggml_writes(goldens):
    for layout in FORMAT.layouts:
        assert layout.nbytes((8, 512)) == goldens[f"{NAMES.get(layout.name, layout.name.upper())}.bytes"].size


# sha256 of what the gguf package 0.19 (ggml's own Python) makes of the same rows.
@pytest.mark.parametrize(("layout", "digest"), [
    ("q4_0", "37cc4f3a8e3aca15257e157e3f96d884af26f2aad5d8c85c007dd62c84d02d0a"),
    ("q4_1", "ed65513c942ee51626f9f6de1900e41aa3a15c272b94e7966df449208933edfc"),
    ("q8_0", "af03620841d45c7d386d181eded0084c3a705a69b85adfe8dcc0b8eabc01309e"),
])  # fmt: skip
def test_encoding_gives_ggml_s_bytes(goldens, layout, digest):
    assert hashlib.sha256(FORMAT.encode(layout, goldens["x"])).hexdigest() == digest


def test_blocks_by_hand():
    half = np.float16(0.5).tobytes()
    low, high = FORMAT.decode("q4_1", half + np.float16(-1).tobytes() + bytes([0xF0] * 16), (32,))[[0, 16]]
    assert (low, high) == (-1.0, 6.5)
    low, high = FORMAT.decode("q4_0", half + bytes([0x8F] * 16), (32,))[[0, 16]]
    assert (low, high) == (3.5, 0.0)
    assert FORMAT.decode("q8_0", half + bytes([0xFE] * 32), (1, 32)).tolist() == [[-1.0] * 32]


@pytest.mark.parametrize("layout", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
@given(
    values=arrays.arrays(np.float32, (3, 32), elements=st.floats(-512, 512, width=32)),
    scale=st.sampled_from([1.0, 2.0**-6]),
)
def test_error_stays_within_the_bound(layout, values, scale):
    values = (values * np.float32(scale)).astype(np.float32)
    values[:, 0] = 8 * scale  # keeps the block's scale a normal float16
    decoded = FORMAT.decode(layout, FORMAT.encode(layout, values), values.shape)
    error, largest = np.abs(decoded - values).max(axis=1), np.abs(values).max(axis=1)
    assert (error <= largest * FORMAT.error_bound(layout)).all()


@pytest.mark.parametrize("layout", ["q4_k", "q5_k", "q6_k", "iq4_xs"])
@given(
    values=arrays.arrays(np.float32, (2, 256), elements=st.floats(-512, 512, width=32)),
    shift=st.sampled_from([0.0, 300.0, -300.0]),
)
def test_error_of_large_blocks_stays_within_the_bound(layout, values, shift):
    values = (values + np.float32(shift)).astype(np.float32)
    values[:, 0] = 8  # keeps the block's scale a normal float16
    decoded = FORMAT.decode(layout, FORMAT.encode(layout, values), values.shape)
    error, largest = np.abs(decoded - values).max(axis=1), np.abs(values).max(axis=1)
    assert (error <= largest * FORMAT.error_bound(layout)).all()


def test_zeros_stay_zeros():
    for layout in ENCODERS:
        zeros = np.zeros((2, 256), np.float32)
        np.testing.assert_array_equal(FORMAT.decode(layout, FORMAT.encode(layout, zeros), zeros.shape), zeros)


def test_sizes_and_layouts_that_do_not_fit():
    with pytest.raises(CheckpointError, match="20 bytes are expected"):
        FORMAT.decode("q4_1", bytes(19), (32,))
    with pytest.raises(CheckpointError, match="multiple of the 32-weight block"):
        FORMAT.decode("q4_1", bytes(20), (33,))
    with pytest.raises(CheckpointError, match="cannot be decoded"):
        FORMAT.decode("iq1_s", bytes(50), (256,))
    with pytest.raises(CheckpointError, match="only read"):
        FORMAT.encode("q2_k", np.zeros((1, 256), np.float32))
    with pytest.raises(CheckpointError, match="only read"):
        FORMAT.error_bound("q2_k")
    with pytest.raises(CheckpointError, match="multiple of 32"):
        FORMAT.encode("q8_0", np.zeros((2, 31), np.float32))


def tensors(*layouts):
    return {
        f"t{n}": TensorInfo(f"t{n}", (1, 256), name, BY_NAME[name].nbytes((1, 256))) for n, name in enumerate(layouts)
    }


def test_detection():
    assert FORMAT.detect({}, tensors("f32", "q4_1", "q8_0")).reasons == ("tensors are stored as q4_1, q8_0",)
    assert FORMAT.detect({}, tensors("f32")).reasons == ("no tensor has a ggml block layout",)
    assert FORMAT.detect({}, tensors("q4_1", "iq1_s")).reasons == (
        "tensors are stored as iq1_s, which cannot be decoded",
    )
