"""Where a weight is said to lie, its bytes are: the same as those that are read."""

import json
import struct

import numpy as np
import pytest

from atlas_core.contracts.checkpoint import Extent
from atlas_core.contracts.model import ExpertStack, NameMap, WeightSource
from atlas_core.loading.accounting import WeightStore
from atlas_core.loading.huggingface import HuggingFaceReader
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import plain
from atlas_core.vocab.model import TensorInfo

SHAPES = {
    "e": (6, 4), "qkv": (12, 4), "turned": (8, 4), "ends": (5, 4), "norm": (4,), "fused": (3, 8, 4), "swapped": (3, 4, 6), "x.0": (2, 4),
    "x.1": (2, 4),
}  # fmt: skip
NAMES = NameMap({
    "embed": WeightSource(("e",)), "head": WeightSource(("h",), tied_to="embed"),
    "q": WeightSource(("qkv",), row_order=(0, 1, 2, 3)), "k": WeightSource(("qkv",), row_order=tuple(range(4, 12))),
    "rope": WeightSource(("turned",), row_order=(0, 4, 1, 5, 2, 6, 3, 7)), "swap": WeightSource(("ends",), row_order=(4, 1, 2, 3, 0)),
    "norm": WeightSource(("norm",), offset=1.0),
    "gate": WeightSource((), stack=ExpertStack((), ("fused",), 8, (0, 8))),
    "up": WeightSource((), stack=ExpertStack((), ("fused",), 8, (2, 8))),
    "down": WeightSource((), stack=ExpertStack((), ("swapped",), 6, (0, 6))),
    "expert": WeightSource((), stack=ExpertStack((("x.0", "x.1"),), (), 2, (0, 2))),
})  # fmt: skip


class Filed:
    """A checkpoint of float32 arrays in one file."""

    naming, config, generation_config, quantization = "hf", {}, {}, {}

    def __init__(self, path):
        self.path, position, self.starts, self.tensors = path, 3, {}, {}
        rng = np.random.default_rng(0)
        data = b"abc"
        for name, shape in SHAPES.items():
            array = rng.standard_normal(shape).astype(np.float32)
            self.tensors[name] = TensorInfo(name, shape, "f32", array.nbytes)
            self.starts[name] = position
            data += array.tobytes()
            position += array.nbytes
        path.write_bytes(data)

    def layout(self, name):
        return plain(DType.F32)

    def extent(self, name):
        return Extent(self.path, self.starts[name], self.tensors[name].nbytes)

    def read(self, name, rows=None):
        data = bytes_of(self.extent(name))
        if rows is None:
            return data
        width = len(data) // self.tensors[name].shape[0]
        return b"".join(data[first * width : end * width] for first, end in rows)


def bytes_of(extent):
    return extent.path.read_bytes()[extent.start : extent.start + extent.nbytes]


@pytest.fixture
def store(tmp_path):
    return WeightStore(Filed(tmp_path / "file"), NAMES)


@pytest.mark.parametrize("weight", ["embed", "head", "q", "k", "rope", "swap", "gate", "expert"])
def test_the_bytes_are_where_they_are_said_to_be(store, weight):
    placed = store.placed(weight)
    data = b"".join(map(bytes_of, placed.extents))
    if placed.order is not None:
        rows = np.frombuffer(data, np.uint8).reshape(max(placed.order) + 1, -1)
        data = rows[list(placed.order)].tobytes()
    assert data == bytes(store.read(weight))


@pytest.mark.parametrize("weight", ["norm", "up", "down"])
def test_bytes_that_are_changed_or_picked_are_nowhere(store, weight):
    assert store.placed(weight) is None
    assert len(store.read(weight))


def test_rows_that_follow_one_another_are_one_range(store):
    assert store.placed("k").order is None
    assert store.placed("k").extents[0].nbytes == 8 * 16


def test_a_directory_tells_where_its_tensors_lie(tmp_path):

    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    arrays = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5, dtype=np.float16)}
    header, data = {}, b""
    for name, array in arrays.items():
        end = len(data) + array.nbytes
        kind = {"float32": "F32", "float16": "F16"}[array.dtype.name]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    checkpoint = HuggingFaceReader().open(tmp_path)
    for name, array in arrays.items():
        assert bytes_of(checkpoint.extent(name)) == array.tobytes() == bytes(checkpoint.read(name))
    checkpoint.close()
