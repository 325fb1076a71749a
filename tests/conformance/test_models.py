"""The fakes that other tests stand on."""

import numpy as np
import pytest

from atlas_core.testing.models import FakeCheckpoint, ScriptedModel, tiny_llama_config
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError


def test_a_fake_checkpoint_reads_like_a_real_one():
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    fake = FakeCheckpoint({}, {"w": array}, DType.BF16)
    assert fake.tensors["w"].nbytes == 24
    assert fake.layout("bf16").block_bytes == 2
    whole = fake.read("w")
    assert len(whole) == 24
    assert fake.read("w", [(3, 4), (0, 2)]) == whole[18:] + whole[:12]
    for wrong in (lambda: fake.read("x"), lambda: fake.layout("f32"), fake.tokenizer):
        with pytest.raises(CheckpointError):
            wrong()


def test_a_scripted_model_knows_what_it_will_say():
    assert ScriptedModel([1, 2, 0]).continuation(0, 4) == [1, 2, 0, 1]


def test_the_tiny_config_can_be_changed():
    assert tiny_llama_config(hidden_size=32)["hidden_size"] == 32
    assert tiny_llama_config()["hidden_size"] == 64
