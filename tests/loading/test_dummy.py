import json
import time

import ml_dtypes
import numpy as np
import pytest

from atlas_core.contracts.model import ExpertStack, NameMap, WeightSource
from atlas_core.loading.accounting import WeightStore
from atlas_core.loading.drawing import draw
from atlas_core.loading.dummy import DummyCheckpoint
from atlas_core.loading.scaled_format import ScaledFormat
from atlas_core.testing.host import HostBackend, HostKernels
from atlas_core.vocab.errors import CheckpointError, DeviceError

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
    """Matrices keep the variance of what they are applied to; tied, the head's deviation counts."""
    untied = NameMap(
        {name: WeightSource((name,)) for name in ("embed", "head", "a.o", "a.q", "a.router", "a.norm", "a.bias")}
    )
    shapes = dict.fromkeys(untied.weights, (3000, 700)) | {"a.norm": (4000,), "a.bias": (4000,)}
    checkpoint = DummyCheckpoint(folder, untied, shapes)
    found = {name: values(checkpoint.read(name)).astype(np.float64) for name in shapes}
    wanted = {"embed": 1, "head": 1.5 / 700**0.5, "a.o": 0.5 / 700**0.5, "a.q": 1 / 700**0.5, "a.router": 4 / 700**0.5}
    for name, spread in wanted.items():
        assert abs(found[name].mean()) < 0.003 * spread
        assert found[name].std() == pytest.approx(spread, rel=0.01)
        assert np.mean(np.abs(found[name]) < spread) == pytest.approx(0.683, abs=0.005)
    assert (found["a.norm"].mean(), found["a.norm"].std()) == pytest.approx((1, 0.1), abs=0.01)
    assert (found["a.bias"].mean(), found["a.bias"].std()) == pytest.approx((0, 0.1), abs=0.01)
    tied = values(DummyCheckpoint(folder, NAMES, SHAPES).read("model.embed.weight"))
    assert tied.std() == pytest.approx(1.5 / 700**0.5, rel=0.01)


def test_decays_are_those_of_a_model_that_was_just_initialised(folder):
    names = NameMap({name: WeightSource((f"model.{name}",)) for name in ("linear.a_log", "linear.dt_bias")})
    checkpoint = DummyCheckpoint(folder, names, dict.fromkeys(names.weights, (4000,)))
    rates = np.exp(values(checkpoint.read("model.linear.a_log")))
    steps = np.log1p(np.exp(values(checkpoint.read("model.linear.dt_bias"))))
    assert 0 < rates.min() < 0.1
    assert rates.mean() == pytest.approx(8, rel=0.05)
    assert 15 < rates.max() < 16.5
    assert np.quantile(np.log(steps), [0, 0.5, 1]) == pytest.approx(np.log([0.001, 0.01, 0.1]), abs=0.2)


def test_norms_that_are_stored_less_one(folder):
    names = NameMap({"norm": WeightSource(("other.norm.weight", "model.norm.weight"), offset=1.0)})
    checkpoint = DummyCheckpoint(folder, names, {"norm": (800,)})
    (stored,) = checkpoint.tensors
    assert values(checkpoint.read(stored)).mean() == pytest.approx(0, abs=0.02)
    assert np.frombuffer(WeightStore(checkpoint, names).read("norm"), np.float32).mean() == pytest.approx(1, abs=0.02)


def test_a_function_of_seed_and_name(folder):
    one = DummyCheckpoint(folder, NAMES, SHAPES, seed=1)
    whole = bytes(one.read("model.embed.weight"))
    assert bytes(DummyCheckpoint(folder, NAMES, SHAPES, seed=1).read("model.embed.weight")) == whole
    assert bytes(DummyCheckpoint(folder, NAMES, SHAPES, seed=2).read("model.embed.weight")) != whole
    rows = [whole[row * 1400 : (row + 1) * 1400] for row in range(3000)]
    assert len(set(rows)) == 3000
    # 2^20 values are drawn at a time: there is a border inside these rows.
    assert bytes(one.read("model.embed.weight", [(1490, 1510), (2, 3)])) == b"".join([*rows[1490:1510], rows[2]])


def test_the_device_makes_what_the_host_reads(folder):
    """Whole tensors, rows cut out of one, experts one behind another; of vectors and what is computed nothing is told."""
    stack = ExpertStack((("e.0.up", "e.1.up", "e.2.up"),), (), 0, (0, 0))
    names = NameMap(NAMES.weights | {"experts.up": WeightSource((), stack=stack)})
    checkpoint = DummyCheckpoint(folder, names, SHAPES | {"experts.up": (3, 1100, 1000)}, seed=3)
    store = WeightStore(checkpoint, names)
    assert store.drawn("norm") is None
    drawn = {name: store.drawn(name) for name in ("embed", "head", "q", "kv", "experts.up")}
    wanted = {name: bytes(store.read(name)) for name in drawn}
    assert len(wanted["experts.up"]) == 6_600_000
    backend = HostBackend(HostKernels(), total_memory=1 << 27)
    places = {name: backend.alloc(len(data)) for name, data in wanted.items()}
    used = backend.memory()
    draw(backend, [(places[name], stretches) for name, stretches in drawn.items()])
    assert {name: bytes(backend.view(places[name], len(data))) for name, data in wanted.items()} == wanted
    assert backend.memory() == used


def test_pools_are_given_back_when_the_device_fails(folder):
    class Broken(HostBackend):
        def copy_d2d_async(self, source, target, nbytes, stream):
            raise DeviceError("the device is gone", "it fell off the bus")

    backend = Broken(HostKernels(), total_memory=1 << 27)
    stretches = DummyCheckpoint(folder, NAMES, SHAPES).stretches("model.embed.weight")
    target = backend.alloc(4_200_000)
    used = backend.memory()
    with pytest.raises(DeviceError, match="is gone"):
        draw(backend, [(target, stretches)])
    assert backend.memory() == used


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


STATEMENTS = {
    "e4m3_tile": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "a.router"]},
    "e4m3_row": {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        "ignore": ["lm_head", "re:a.rout.*"],
    },
    "nvfp4": {
        "config_groups": {"group_0": {"targets": ["a.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        "ignore": ["a.router"],
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", STATEMENTS)
def test_what_a_config_states_is_how_they_are_stored(tmp_path, layout):
    """Of the same deviation, row for row the same however they are read, and never on the device alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy", "quantization_config": STATEMENTS[layout]}))
    names = NameMap({name: WeightSource((f"{name}.weight",)) for name in ("lm_head", "a.q", "a.router", "a.norm")})
    shapes = dict.fromkeys(names.weights, (3000, 512)) | {"a.norm": (4000,)}
    checkpoint = DummyCheckpoint(tmp_path, names, shapes)
    layouts = {name: info.layout for name, info in checkpoint.tensors.items()}
    assert layouts == {
        "lm_head.weight": "bf16",
        "a.router.weight": "bf16",
        "a.norm.weight": "bf16",
        "a.q.weight": layout,
    }
    info = checkpoint.tensors["a.q.weight"]
    assert checkpoint.stretches("a.q.weight") is None
    data = checkpoint.read("a.q.weight")
    assert len(data) == info.nbytes == checkpoint.layout(layout).nbytes(info.shape)
    found = ScaledFormat().decode(layout, data, info.shape).astype(np.float64)
    assert abs(found.mean()) < 0.003 / 512**0.5
    assert found.std() == pytest.approx(512**-0.5, rel=0.02)
    each = info.nbytes // 3000
    parts = bytes(checkpoint.read("a.q.weight", [(8, 40), (2990, 3000)]))
    assert parts == bytes(data)[8 * each : 40 * each] + bytes(data)[2990 * each :]
