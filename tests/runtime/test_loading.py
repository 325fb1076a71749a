"""Weights onto the device, steps into graphs: with the whole way from a recorded model to tokens on the host double."""

import numpy as np
import pytest

from atlas_core.contracts.ops import Buffer, Packed
from atlas_core.loading.upload import load_weights
from atlas_core.model.arena import place
from atlas_core.model.builder import StepLayout, record
from atlas_core.model.planner import Bucket, Choices, Context, plan
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.ops.batch import float_bits
from atlas_core.ops.step import COUNT_WORDS, Count, SlotLayout, Word
from atlas_core.runtime.bound import BoundStep, StepMemory, bind_step
from atlas_core.runtime.loader import load_arrays, weight_copies
from atlas_core.testing.host import HostBackend, HostKernels, ReferenceImplementation, reference_implementations
from atlas_core.testing.models import ScriptedModel
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import BudgetError, CheckpointError, EngineError, KernelError
from atlas_core.vocab.layout import plain

SUCCESSOR = [3, 0, 1, 4, 2]
MODEL = ScriptedModel(SUCCESSOR)
SLOTS = SlotLayout(2, (4,), 2)
LAYOUT = StepLayout(SLOTS, 4, DType.F32, 2)
PROGRAM = record(MODEL, MODEL.spec, LAYOUT)
STORED = plain(DType.F32)


class Packing(ReferenceImplementation):
    """Reads its weights negated, as a stand-in for a packing; undoes it before computing."""

    def packings(self, need):
        return {"weight": Packed("negated", need.operands["weight"].layout.nbytes(need.operands["weight"].shape))}

    def pack(self, packing, layout, shape, data):
        assert packing == "negated"
        return -np.frombuffer(data, np.float32)

    def _decode(self, need, operand, memory):
        return -super()._decode(need, operand, memory)


def planned(bucket, kernels, packing=False, choices=None):
    implementations = reference_implementations(kernels)
    if packing:
        linear = next(i for i in implementations if i.op == "linear")
        implementations[implementations.index(linear)] = Packing(linear._contract, kernels)
    layouts = {value.name: STORED for value in PROGRAM.weights()}
    return plan(
        PROGRAM, bucket, Context("host", "exact", DType.F32, layouts, implementations, ()), choices or Choices()
    )


class Whole:
    """Weights that are nowhere in a file."""

    def __init__(self, read):
        self.read = read

    def drawn(self, weight):
        return None

    def placed(self, weight):
        return None


def reader(name):
    return MODEL.weights()[name].tobytes()


@pytest.mark.parametrize("packing", [False, True])
def test_a_model_is_planned_loaded_bound_and_generates(packing):
    kernels = HostKernels()
    backend = HostBackend(kernels)
    prefill, decode = Bucket(8, 2, 2, 16, 8), Bucket(2, 2, 2, 16, 1)
    choices = Choices()
    plans = [planned(bucket, kernels, packing, choices) for bucket in (decode, prefill)]
    seen = []
    weights = load_weights(
        backend, weight_copies([s for p in plans for s in p]), Whole(reader), lambda *told: seen.append(told)
    )
    assert seen[-1][0] == seen[-1][1] == sum(buffer.nbytes for buffer in weights.buffers.values())
    # The embedding is not packed; the head is read packed by the one linear.
    assert {key[0] for key in weights.buffers} == set(MODEL.weights())
    assert {name for _, name in weights.buffers} == ({"stored:f32", "negated"} if packing else {"stored:f32"})

    sizes = {}
    for node in PROGRAM.nodes:
        for value in node.operands.values():
            if value.kind in ("input", "state"):
                sizes[value.name] = int(np.prod(prefill.shape(value))) * value.dtype.itemsize
    page = choices.caches["cache.full"].page_bytes(1, 8)
    sizes["cache.full"] = 9 * page
    values = {name: Buffer(backend.alloc(nbytes), nbytes) for name, nbytes in sizes.items()}
    for buffer in values.values():
        backend.copy_h2d(bytes(buffer.nbytes), buffer.address)
    counts = backend.alloc(4 * COUNT_WORDS)
    arenas = [place(PROGRAM, p, bucket) for p, bucket in zip(plans, (decode, prefill), strict=True)]
    arena = Buffer(backend.alloc(max(a.nbytes for a in arenas)), max(a.nbytes for a in arenas))
    memory = StepMemory(arena, Buffer(backend.alloc(1), 0), counts, values, weights.buffers)
    stream = backend.create_stream()
    steps = [bind_step(backend, p, a, memory, stream) for p, a in zip(plans, arenas, strict=True)]
    assert steps[0].launches == {"forward": 11, "sample": 4}
    assert not backend.launches  # binding captures and runs nothing

    def write(name, *numbers):
        backend.copy_h2d(np.array(numbers, np.int32).tobytes(), values[name].address)

    def step(which, token_ids, cu_q):
        write("token_ids", *token_ids)
        write("cu_q", *cu_q)
        write("logits_rows", *(end - 1 for end in cu_q[1:]))
        live = np.zeros(COUNT_WORDS, np.int32)
        live[[Count.TOKENS, Count.SEQUENCES, Count.ROWS]] = cu_q[-1], len(cu_q) - 1, len(cu_q) - 1
        backend.copy_h2d(live.tobytes(), counts)
        for segment in ("forward", "sample"):
            steps[which].launch(segment, stream)
        backend.synchronize(stream)
        result = steps[which].activations["sampled"]
        return np.frombuffer(backend.view(result.address, 4 * (len(cu_q) - 1)), np.int32).tolist()

    slots = np.zeros(SLOTS.words, np.int32)
    for slot in range(2):
        slots[SLOTS.word(slot, Word.PENALTY_ROW)] = slots[SLOTS.word(slot, Word.LOGPROBS)] = -1
        slots[SLOTS.word(slot, Word.REPETITION)] = slots[SLOTS.word(slot, Word.TOP_P)] = float_bits(1.0)
        slots[SLOTS.block(slot, 0, 0) :][:4] = range(4 * slot, 4 * slot + 4)
    write("slots", *slots)
    write("row_slot", 1, 0)
    write("sample_row", 0, 1)
    told = [step(1, [0, 1, 2, 4, 4], [0, 3, 5])]
    told += [step(0, [-1, -1], [0, 1, 2]) for _ in range(5)]
    first, second = zip(*told, strict=True)
    assert list(first) == MODEL.continuation(2, 6)
    assert list(second) == MODEL.continuation(4, 6)
    free = backend.memory()[0]
    weights.free()
    assert backend.memory()[0] > free
    for bound in steps:
        bound.destroy()
    assert not steps[0].graphs


DECODE = Bucket(2, 2, 2, 4, 1)


def test_each_packing_of_a_weight_is_held_once_and_read_once():
    kernels, reads = HostKernels(), []

    def read(name):
        reads.append(name)
        return reader(name)

    copies = weight_copies(
        [*planned(DECODE, kernels), *planned(DECODE, kernels), *planned(DECODE, kernels, packing=True)]
    )
    linear = {"q", "k", "v", "o", "head"}
    assert sorted((c.weight, c.packed.name) for c in copies) == sorted(
        [(name, "stored:f32") for name in ("embed", *linear)] + [(name, "negated") for name in linear]
    )
    backend = HostBackend(kernels)
    memory = load_weights(backend, copies, Whole(read))
    assert sorted(reads) == sorted(MODEL.weights())
    head = MODEL.weights()["head"]
    for packing, want in (("stored:f32", head), ("negated", -head)):
        buffer = memory.buffers["head", packing]
        np.testing.assert_array_equal(
            np.frombuffer(backend.view(buffer.address, buffer.nbytes), np.float32), want.ravel()
        )


@pytest.mark.parametrize(
    ("read", "total", "error"),
    [
        (lambda name: reader(name)[:-1], 1 << 20, CheckpointError),
        (reader, 300, BudgetError),
    ],
)
def test_a_failed_load_gives_everything_back(read, total, error):
    kernels = HostKernels()
    backend = HostBackend(kernels, total_memory=total)
    with pytest.raises(error):
        load_weights(backend, weight_copies(planned(DECODE, kernels)), Whole(read))
    assert backend.memory() == (total, total)


def test_a_packing_that_is_not_of_its_announced_size_is_a_kernel_error():
    class Short(Packing):
        def pack(self, packing, layout, shape, data):
            return bytes(4)

    kernels = HostKernels()
    segments = planned(DECODE, kernels, packing=True)
    for segment in segments:
        for step in segment.steps:
            if isinstance(step.implementation, Packing):
                step.implementation.__class__ = Short
    with pytest.raises(KernelError, match="has 4 bytes"):
        load_weights(HostBackend(kernels), weight_copies(segments), Whole(reader))


def test_arrays_go_to_the_device_as_they_are():
    backend = HostBackend(HostKernels())
    array = np.arange(6, dtype=numpy_dtype(DType.BF16)).reshape(2, 3)
    (buffer,) = load_arrays(backend, {"x": array.T}).values()
    assert bytes(backend.view(buffer.address, buffer.nbytes)) == array.T.tobytes()
    small = HostBackend(HostKernels(), total_memory=20)
    with pytest.raises(BudgetError):
        load_arrays(small, {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)})
    assert small.memory() == (20, 20)


def test_what_launches_keep_is_there_until_the_step_is_given_back():
    kernels = HostKernels()
    backend = HostBackend(kernels)
    step = BoundStep(backend, {})
    before = backend.memory()[0]
    address = step.keep(b"a table of addresses")
    found = bytearray(20)
    backend.copy_d2h(address, memoryview(found))
    assert found == b"a table of addresses"
    assert backend.memory()[0] < before
    step.destroy()
    assert backend.memory()[0] == before
    assert step.kept == []


def test_memory_that_is_missing_or_small_is_named_and_no_graph_is_left():
    kernels = HostKernels()
    backend = HostBackend(kernels)
    segments = planned(DECODE, kernels)
    arena = place(PROGRAM, segments, DECODE)
    address = backend.alloc(arena.nbytes)
    full = Buffer(address, arena.nbytes)
    memory = StepMemory(full, Buffer(address, 0), address, {}, {})
    with pytest.raises(EngineError, match="input updates has no memory"):
        bind_step(backend, segments, arena, memory, backend.create_stream())
    memory = StepMemory(Buffer(address, arena.nbytes - 1), Buffer(address, 0), address, {}, {})
    with pytest.raises(EngineError, match="the arena has"):
        bind_step(backend, segments, arena, memory, backend.create_stream())
