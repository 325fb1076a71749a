"""Decoding in stretches gives what decoding at once gives, and an error of any stretch is told."""

import numpy as np
import pytest

from atlas_core.loading.plain import PlainFormat
from atlas_core.loading.scaled_format import ScaledFormat
from atlas_core.loading.transcode import transcode
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.ops.scaled import E4M3_BLOCK, LAYOUTS
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import plain

RNG = np.random.default_rng(2)
LARGE = (3, 50, 128)
"""More than two stretches, the last of them cut."""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Stretches of few weights."""
    monkeypatch.setattr("atlas_core.loading.transcode._STRETCH", 4096)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scalar", [DType.BF16, DType.F32])
@pytest.mark.parametrize("shape", [LARGE, (5, 128)])
def test_stretches_are_the_whole(layout, scalar, shape):
    owner = ScaledFormat()
    data = owner.encode(layout.name, RNG.standard_normal(shape, np.float32))
    want = owner.decode(layout.name, data, shape).astype(numpy_dtype(scalar))
    assert bytes(transcode(owner, layout, data, shape, scalar)) == want.tobytes()


def test_plain_numbers_are_rounded_to_even():
    values = np.float32([[1 + 2**-8, 1 + 3 * 2**-8]])
    got = transcode(PlainFormat(), plain(DType.F32), values.tobytes(), (1, 2), DType.BF16)
    assert np.frombuffer(got, numpy_dtype(DType.BF16)).astype(np.float32).tolist() == [1.0, 1 + 2**-6]


@pytest.mark.parametrize("shape", [LARGE, (5, 128)])
def test_another_size_is_refused(shape):
    with pytest.raises(CheckpointError, match="bytes"):
        transcode(ScaledFormat(), E4M3_BLOCK, bytes(36), shape, DType.F32)


def test_an_error_of_one_stretch_is_told():
    class Breaking(ScaledFormat):
        def decode(self, layout, data, shape):
            if shape[0] * shape[1] < 4096:
                raise CheckpointError("the last stretch is broken")
            return super().decode(layout, data, shape)

    data = ScaledFormat().encode(E4M3_BLOCK.name, np.zeros(LARGE, np.float32))
    with pytest.raises(CheckpointError, match="the last stretch is broken"):
        transcode(Breaking(), E4M3_BLOCK, data, LARGE, DType.F32)
