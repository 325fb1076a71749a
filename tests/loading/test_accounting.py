import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.contracts.model import NameMap, WeightSource
from atlas_core.loading import accounting
from atlas_core.loading.accounting import WeightStore
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import plain
from atlas_core.vocab.model import TensorInfo

F32 = plain(DType.F32)


class Memory:
    """A checkpoint of float32 arrays."""

    path = Path("toy")
    naming = "hf"

    def __init__(self, **arrays):
        self.arrays = {name.replace("__", "."): np.asarray(values, np.float32) for name, values in arrays.items()}
        self.tensors = {name: TensorInfo(name, a.shape, "f32", a.nbytes) for name, a in self.arrays.items()}
        self.config = self.generation_config = self.quantization = {}
        self.reads = []

    def layout(self, name):
        return F32

    def read(self, name, rows=None):
        self.reads.append((name, rows))
        array = self.arrays[name]
        return array.tobytes() if rows is None else b"".join(array[start:end].tobytes() for start, end in rows)

    def tokenizer(self):
        raise NotImplementedError

    def close(self):
        pass


def values(store, canonical):
    return np.frombuffer(store.read(canonical), np.float32).tolist()


def source(*names, **options):
    return WeightSource(names, **options)


TIED = NameMap({"embed": source("e"), "head": source("h", tied_to="embed")})
UNTIED = NameMap({"embed": source("e"), "head": source("h")})


def test_tied_and_absent_shares():
    store = WeightStore(Memory(e=[[1.0]]), TIED)
    assert (store.alias("head"), store.info("head", (1, 1)).name, values(store, "head")) == ("embed", "e", [1.0])
    assert store.warnings == []


def test_tied_and_equal_shares():
    store = WeightStore(Memory(e=[[1.0], [2.0]], h=[[1.0], [2.0]]), TIED)
    assert (store.alias("head"), store.info("head", (2, 1)).name, store.warnings) == ("embed", "e", [])


@pytest.mark.parametrize("head", [[[1.0], [3.0]], [[1.0], [2.0], [3.0]]])
def test_tied_and_different_uses_the_stored_head_and_warns(head):
    store = WeightStore(Memory(e=[[1.0], [2.0]], h=head), TIED)
    assert store.alias("head") == "head"
    assert values(store, "head") == list(itertools.chain(*head))
    assert len(store.warnings) == 1
    assert "h is stored and differs from e" in store.warnings[0]


def test_a_difference_in_the_last_piece_is_seen(monkeypatch):
    monkeypatch.setattr(accounting, "_COMPARE_BYTES", 4)
    embed, head = np.zeros((5, 1)), np.zeros((5, 1))
    head[4] = 1.0
    assert WeightStore(Memory(e=embed, h=head), TIED).warnings
    assert not WeightStore(Memory(e=embed, h=embed), TIED).warnings


def test_untied_uses_the_head_and_must_have_one():
    assert values(WeightStore(Memory(e=[[1.0]], h=[[1.0]]), UNTIED), "head") == [1.0]
    assert WeightStore(Memory(e=[[1.0]], h=[[1.0]]), UNTIED).alias("head") == "head"
    with pytest.raises(CheckpointError, match="lacks 1 weights") as caught:
        WeightStore(Memory(e=[[1.0]]), UNTIED)
    assert caught.value.why == "head (looked for h)"


def test_the_first_name_that_is_there():
    names = NameMap({"w": source("new", "old")})
    assert values(WeightStore(Memory(old=[1.0]), names), "w") == [1.0]
    with pytest.raises(CheckpointError, match="does not use") as caught:
        WeightStore(Memory(old=[1.0], new=[2.0]), names)
    assert caught.value.why == "old"


def test_tensors_are_used_or_ignored_by_pattern():
    names = NameMap({"w": source("w")}, ignored=("*.inv_freq",))
    store = WeightStore(Memory(w=[1.0], layers__0__inv_freq=[1.0]), names)
    assert store.unused() == []
    with pytest.raises(CheckpointError, match="has 10 tensors that the model does not use") as caught:
        WeightStore(Memory(w=[1.0], **{f"x{n}": [1.0] for n in range(10)}), names)
    assert caught.value.why == "x0, x1, x2, x3, x4, x5, x6, x7 and 2 more"


def test_optional_weights():
    store = WeightStore(Memory(w=[1.0]), NameMap({"w": source("w"), "bias": source("b", optional=True)}))
    assert store.has("w")
    assert not store.has("bias")
    with pytest.raises(CheckpointError, match="no weight bias"):
        store.info("bias", (1,))


def test_wrong_shapes_and_unknown_weights():
    store = WeightStore(Memory(w=[[1.0, 2.0]]), NameMap({"w": source("w")}))
    with pytest.raises(CheckpointError, match="wrong shape for w") as caught:
        store.info("w", (2, 1))
    assert caught.value.why == "expected [2, 1], found [1, 2]"
    with pytest.raises(CheckpointError, match="asks for the weight v"):
        store.info("v", (1,))


# llama.cpp stores the rows of q and k so; head size 6, because with 4 the order is its own inverse.
STORED = (0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11)


@pytest.mark.parametrize("run_bytes", [1, 1 << 20])
def test_rows_come_in_the_model_s_order(monkeypatch, run_bytes):
    monkeypatch.setattr(accounting, "_RUN_BYTES", run_bytes)
    order = tuple(STORED.index(row) for row in range(12))
    assert order != STORED
    checkpoint = Memory(w=[[row, row + 0.5] for row in STORED], b=STORED)
    names = NameMap({"w": source("w", row_order=order), "b": source("b", row_order=order)})
    store = WeightStore(checkpoint, names)
    assert store.info("w", (12, 2)).nbytes == 96
    assert values(store, "w") == [value for row in range(12) for value in (row, row + 0.5)]
    assert values(store, "b") == list(range(12))


def test_runs_of_rows_are_read_as_ranges(monkeypatch):
    monkeypatch.setattr(accounting, "_RUN_BYTES", 1)
    checkpoint = Memory(w=[[row] for row in range(6)])
    store = WeightStore(checkpoint, NameMap({"w": source("w", row_order=(4, 5, 0, 1, 2))}))
    assert store.info("w", (5, 1)).shape == (5, 1)
    assert values(store, "w") == [4, 5, 0, 1, 2]
    assert checkpoint.reads == [("w", [(4, 6), (0, 3)])]


def test_rows_that_are_not_there():
    store = WeightStore(Memory(w=[[1.0]]), NameMap({"w": source("w", row_order=(0, 1))}))
    with pytest.raises(CheckpointError, match="wrong shape") as caught:
        store.info("w", (2, 1))
    assert caught.value.why == "expected [2, 1], found [1, 1]"


@given(st.permutations(range(9)), st.sampled_from([1, 16, 1 << 20]))
def test_any_order_by_either_way_of_reading(order, run_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting, "_RUN_BYTES", run_bytes)
        store = WeightStore(Memory(w=np.arange(9)), NameMap({"w": source("w", row_order=tuple(order))}))
        assert values(store, "w") == list(order)
