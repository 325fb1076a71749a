import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.contracts.quant import QuantFormat
from atlas_core.loading.plain import PlainFormat
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import TensorInfo

FORMAT: QuantFormat = PlainFormat()


@pytest.mark.parametrize(
    ("layout", "data", "value"),
    [
        ("f32", b"\x00\x00\xc0\x3f", 1.5),
        ("bf16", b"\xc0\x3f", 1.5),
        ("f16", b"\x00\x3e", 1.5),
        ("bf16", b"\x80\xff", -np.inf),
        ("f16", b"\x01\x00", 2.0**-24),
    ],
)
def test_values(layout, data, value):
    assert FORMAT.decode(layout, data, (1, 1)).tolist() == [[value]]
    assert FORMAT.encode(layout, np.array([[value]], np.float32)) == data


@pytest.mark.parametrize("layout", ["f32", "bf16", "f16"])
@given(st.lists(st.floats(2.0**-14, 65504, width=32), min_size=1, max_size=8))
def test_error_stays_within_the_bound(layout, values):
    array = np.array(values, np.float32)
    error = np.abs(FORMAT.decode(layout, FORMAT.encode(layout, array), array.shape) - array)
    assert (error <= array * np.float32(FORMAT.error_bound(layout))).all()


def test_ties_go_to_even():
    assert FORMAT.decode("bf16", FORMAT.encode("bf16", np.float32([1 + 2**-8, 1 + 3 * 2**-8])), (2,)).tolist() == [
        1.0, 1 + 2**-6,
    ]  # fmt: skip


def test_what_does_not_fit():
    with pytest.raises(CheckpointError, match="has 3 bytes"):
        FORMAT.decode("bf16", bytes(3), (2,))
    with pytest.raises(CheckpointError, match="no layout 'q4_1'"):
        FORMAT.decode("q4_1", bytes(20), (32,))


def tensors(**layouts):
    return {name: TensorInfo(name, (1,), layout, 1) for name, layout in layouts.items()}


def test_detection():
    assert FORMAT.detect({}, tensors(a="bf16", position_ids="i64")).ok
    assert FORMAT.detect({}, tensors(a="bf16", b="u8")).reasons == ("b is stored as u8",)
    stated = FORMAT.detect({"quant_method": "fp8"}, tensors(a="bf16"))
    assert stated.reasons == ("the checkpoint states a quantisation: fp8",)
