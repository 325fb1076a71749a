"""What every family reads alike out of a config.json."""

import pytest

from atlas_core.model.config import ConfigReader
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError


def test_key_heads_are_as_many_as_query_heads_unless_said_otherwise():
    assert ConfigReader({"num_attention_heads": 8}).heads() == (8, 8)
    assert ConfigReader({"num_attention_heads": 8, "num_key_value_heads": 2}).heads() == (8, 2)
    assert ConfigReader({"num_key_value_heads": None}).heads(6, 3) == (6, 3)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no num_attention_heads"),
        ({"num_attention_heads": 0}, "above zero"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 3},
            "num_key_value_heads",
        ),
    ],
)
def test_heads_that_cannot_be(config, said):
    with pytest.raises(CheckpointError, match=said):
        ConfigReader(config).heads()


def test_the_type_has_two_spellings():
    assert ConfigReader({"torch_dtype": "bfloat16", "dtype": "float32"}).dtype() is DType.BF16
    assert ConfigReader({"torch_dtype": None, "dtype": "float16"}).dtype() is DType.F16
    assert ConfigReader({}).dtype() is DType.F32
    assert ConfigReader({}).dtype(DType.BF16) is DType.BF16


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_a_type_that_nobody_knows_is_refused(key):
    with pytest.raises(CheckpointError, match=f"{key} = 'float64'"):
        ConfigReader({key: "float64"}).dtype()
