import time

import ml_dtypes
import numpy as np
import pytest

from atlas_core.contracts.model import NameMap, WeightSource
from atlas_core.loading.accounting import WeightStore
from atlas_core.loading.dummy import DummyCheckpoint
from atlas_core.vocab.errors import CheckpointError

NAMES = NameMap({
    "embed": WeightSource(("model.embed.weight",)),
    "head": WeightSource(("lm_head.weight",), tied_to="embed"),
    "norm": WeightSource(("model.norm.weight",)),
    "q": WeightSource(("qkv.weight",), row_order=(0, 1)),
    "kv": WeightSource(("qkv.weight",), row_order=(2, 3, 4)),
    "absent": WeightSource(("absent.weight",), optional=True),
})  # fmt: skip
SHAPES = {"embed": (3000, 700), "head": (3000, 700), "norm": (700,), "q": (2, 8), "kv": (3, 8)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    return tmp_path


def values(data):
    return np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32)


def test_the_shapes_that_the_program_asks_for(folder):
    checkpoint = DummyCheckpoint(folder, NAMES, SHAPES)
    assert {name: (info.shape, info.layout) for name, info in checkpoint.tensors.items()} == {
        "model.embed.weight": ((3000, 700), "bf16"),
        "model.norm.weight": ((700,), "bf16"),
        "qkv.weight": ((5, 8), "bf16"),
    }
    store = WeightStore(checkpoint, NAMES)
    assert store.info("head", (3000, 700)).name == "model.embed.weight"
    assert np.array_equal(values(store.read("kv")), values(checkpoint.read("qkv.weight"))[16:])


def test_the_distribution(folder):
    checkpoint = DummyCheckpoint(folder, NAMES, SHAPES)
    drawn = values(checkpoint.read("model.embed.weight")).astype(np.float64)
    assert abs(drawn.mean()) < 1e-4
    assert drawn.std() == pytest.approx(0.02, rel=0.01)
    assert np.mean(np.abs(drawn) < 0.02) == pytest.approx(0.683, abs=0.005)
    assert (values(checkpoint.read("model.norm.weight")) == 1.0).all()


def test_norms_that_are_stored_less_one(folder):
    names = NameMap({"norm": WeightSource(("other.norm.weight", "model.norm.weight"), offset=1.0)})
    checkpoint = DummyCheckpoint(folder, names, {"norm": (8,)})
    (stored,) = checkpoint.tensors
    assert (values(checkpoint.read(stored)) == 0.0).all()


def test_a_function_of_seed_and_name(folder):
    one = DummyCheckpoint(folder, NAMES, SHAPES, seed=1)
    whole = bytes(one.read("model.embed.weight"))
    assert bytes(DummyCheckpoint(folder, NAMES, SHAPES, seed=1).read("model.embed.weight")) == whole
    assert bytes(DummyCheckpoint(folder, NAMES, SHAPES, seed=2).read("model.embed.weight")) != whole
    rows = [whole[row * 1400 : (row + 1) * 1400] for row in range(3000)]
    assert len(set(rows)) == 3000
    # 65,536 values are drawn at a time: there are borders inside these rows.
    assert bytes(one.read("model.embed.weight", [(1490, 1510), (2, 3)])) == b"".join([*rows[1490:1510], rows[2]])


def test_it_is_fast(folder):
    checkpoint = DummyCheckpoint(folder, NAMES, SHAPES)
    checkpoint.read("qkv.weight")
    start = time.perf_counter()
    checkpoint.read("model.embed.weight")
    # 2.1 million values. An engine that loads 8 billion must not wait for minutes; the margin is for a busy machine.
    assert time.perf_counter() - start < 0.5


def test_what_is_not_there(folder):
    checkpoint = DummyCheckpoint(folder, NAMES, SHAPES)
    with pytest.raises(CheckpointError, match="no dummy tensor"):
        checkpoint.read("absent.weight")
    with pytest.raises(CheckpointError, match="has 5 rows"):
        checkpoint.read("qkv.weight", [(0, 6)])
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        checkpoint.tokenizer()
    with pytest.raises(CheckpointError, match="asks for other"):
        DummyCheckpoint(folder, NAMES, {"other": (1,)})
