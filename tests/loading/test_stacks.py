"""Stacks of experts in every way in which checkpoints keep them, and weights that are stored less one."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from atlas_core.contracts.model import ExpertStack, NameMap, WeightSource
from atlas_core.loading.accounting import WeightStore
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import TensorInfo

EXPERTS, ROWS, COLUMNS = 3, 4, 5
GATE = np.arange(EXPERTS * ROWS * COLUMNS, dtype=np.float32).reshape(EXPERTS, ROWS, COLUMNS)
UP = GATE + 1000
LAYOUTS = {"f32": plain(DType.F32), "bf16": plain(DType.BF16), "q": StorageLayout("q", 5, 5)}
KINDS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "q": np.uint8}


class Memory:
    """A checkpoint of arrays in one layout."""

    path = Path("toy")

    def __init__(self, layout="f32", **arrays):
        self.arrays = {name: np.asarray(array).astype(KINDS[layout]) for name, array in arrays.items()}
        self.tensors = {name: TensorInfo(name, a.shape, layout, a.nbytes) for name, a in self.arrays.items()}

    def layout(self, name):
        return LAYOUTS[name]

    def read(self, name, rows=None):
        array = self.arrays[name]
        return array.tobytes() if rows is None else b"".join(array[start:end].tobytes() for start, end in rows)


def stack(part):
    first = 0 if part == "gate" else ROWS
    names = tuple(tuple(f"{at}e{expert}_{part}" for expert in range(EXPERTS)) for at in ("a_", "b_"))
    return ExpertStack(names, ("fused", "other"), 2 * ROWS, (first, first + ROWS))


BOTH = NameMap({part: WeightSource((), stack=stack(part)) for part in ("gate", "up")})


def experts(at):
    return {
        f"{at}e{expert}_{part}": array[expert]
        for part, array in (("gate", GATE), ("up", UP))
        for expert in range(EXPERTS)
    }


def fused():
    return np.concatenate([GATE, UP], axis=1)


@pytest.mark.parametrize(
    "arrays", [experts("a_"), experts("b_"), {"fused": fused()}, {"other": fused().transpose(0, 2, 1)}]
)
@pytest.mark.parametrize("layout", ["f32", "bf16"])
def test_every_way_gives_the_same_weight(arrays, layout):
    store = WeightStore(Memory(layout, **arrays), BOTH)
    for part, want in (("gate", GATE), ("up", UP)):
        info = store.info(part, (EXPERTS, ROWS, COLUMNS))
        assert (info.shape, info.layout, info.nbytes) == (want.shape, layout, want.astype(KINDS[layout]).nbytes)
        got = np.frombuffer(store.read(part), KINDS[layout]).astype(np.float32).reshape(want.shape)
        np.testing.assert_array_equal(got, want.astype(KINDS[layout]).astype(np.float32))
    assert store.unused() == []


def test_a_whole_fused_tensor_is_read_at_once():
    whole = NameMap({"gate": WeightSource((), stack=ExpertStack((), ("fused",), ROWS, (0, ROWS)))})
    store = WeightStore(Memory(fused=GATE), whole)
    assert bytes(store.read("gate")) == GATE.tobytes()


def test_blocks_may_be_picked_but_not_turned():
    store = WeightStore(Memory("q", fused=fused() % 251), BOTH)
    assert store.info("up", (EXPERTS, ROWS, COLUMNS)).nbytes == UP.size
    assert bytes(store.read("up")) == (UP % 251).astype(np.uint8).tobytes()
    turned = WeightStore(Memory("q", fused=fused().transpose(0, 2, 1) % 251), BOTH)
    with pytest.raises(CheckpointError, match="stored transposed as q"):
        turned.info("up", (EXPERTS, ROWS, COLUMNS))


def test_what_does_not_fit_is_named():
    arrays = experts("a_")
    del arrays["a_e1_up"]
    with pytest.raises(CheckpointError, match="a_e1_up"):
        WeightStore(Memory(**arrays), BOTH)
    with pytest.raises(CheckpointError, match="looked for fused, other, a_e0_gate"):
        WeightStore(Memory(unrelated=GATE), BOTH)
    store = WeightStore(Memory(**{**experts("a_"), "a_e2_up": UP[0].T}), BOTH)
    with pytest.raises(CheckpointError, match="a_e2_up"):
        store.info("up", (EXPERTS, ROWS, COLUMNS))
    with pytest.raises(CheckpointError, match=r"fused.*\n.*expected \[3, 8, 5\] or, transposed, \[3, 5, 8\]"):
        WeightStore(Memory(fused=GATE), BOTH).info("up", (EXPERTS, ROWS, COLUMNS))
    with pytest.raises(CheckpointError, match="asks for 4 experts"):
        WeightStore(Memory(**experts("a_")), BOTH).info("up", (EXPERTS + 1, ROWS, COLUMNS))


def test_an_expert_too_many_is_not_ignored():
    with pytest.raises(CheckpointError, match="a_e3_up"):
        WeightStore(Memory(**experts("a_"), a_e3_up=UP[0]), BOTH)


@pytest.mark.parametrize("layout", ["f32", "bf16"])
def test_an_offset_makes_a_float32_weight_without_rounding_the_sum(layout):
    stored = np.array([0.001, -0.5, 0.0078125], np.float32)
    store = WeightStore(Memory(layout, norm=stored), NameMap({"norm": WeightSource(("norm",), offset=1.0)}))
    assert store.layout("norm").name == "f32"
    assert store.info("norm", (3,)).nbytes == 12
    want = stored.astype(KINDS[layout]).astype(np.float32) + np.float32(1)
    np.testing.assert_array_equal(np.frombuffer(store.read("norm"), np.float32), want)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_factor_multiplies_the_sum(offset):
    stored = np.array([1.0, -0.5, 3.0], np.float32)
    store = WeightStore(
        Memory("bf16", norm=stored), NameMap({"norm": WeightSource(("norm",), offset=offset, factor=0.25)})
    )
    assert store.layout("norm").name == "f32"
    want = (stored + np.float32(offset)) / np.float32(4)
    np.testing.assert_array_equal(np.frombuffer(store.read("norm"), np.float32), want)


def test_an_offset_wants_a_plain_array():
    store = WeightStore(Memory("q", norm=np.zeros(5)), NameMap({"norm": WeightSource(("norm",), offset=1.0)}))
    with pytest.raises(CheckpointError, match="stored as q"):
        store.read("norm")


def test_inner_dimensions_of_one_do_not_count():
    names = NameMap({"w": WeightSource(("w",))})
    assert WeightStore(Memory(w=np.zeros((4, 1, 3))), names).info("w", (4, 3)).shape == (4, 3)
    with pytest.raises(CheckpointError, match="wrong shape"):
        WeightStore(Memory(w=np.zeros((1, 4))), names).info("w", (4,))
