"""The CPU as a backend: memory, copies, capture and replay, events, threads, and errors that name what is wrong."""

import resource
import threading
import time

import numpy as np
import pytest

from atlas_core.contracts.backend import Forewarned, GpuBackend, HostRunner
from atlas_core.vocab.errors import BudgetError, DeviceError, KernelError, UsageError
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, f32, i32, ptr
from atlas_plugin_cpu.backend import open_backend


def floats(backend, values):
    """Device memory that holds ``values``, and a way to read it back."""
    values = np.asarray(values, np.float32)
    address = backend.alloc(values.nbytes)
    backend.copy_h2d(values.tobytes(), address)

    def read():
        target = bytearray(values.nbytes)
        backend.copy_d2h(address, memoryview(target))
        return np.frombuffer(target, np.float32).reshape(values.shape)

    return address, read


def counts_of(backend, tokens):
    address = backend.alloc(32)
    backend.copy_h2d(np.array([tokens] + [0] * 7, np.int32).tobytes(), address)
    return address


def add(backend, counts, x, z, y, columns, tasks=0):
    kernel = backend.kernel("elementwise", "add")
    return backend.prepare_launch(
        kernel, Geometry((tasks, 1, 1)), (ptr(counts), i32(0), ptr(x), ptr(z), ptr(y), i32(columns))
    )


def test_it_is_a_backend_and_says_what_it_is(backend):
    assert isinstance(backend, GpuBackend)
    facts = backend.facts()
    assert facts.processors == 3
    assert facts.arch.startswith("native-")
    assert facts.name
    free, total = backend.memory()
    assert 0 < free <= total == facts.total_memory


def test_memory_is_aligned_and_holds_what_was_copied(backend):
    for nbytes in (0, 1, 4097, 3 << 20):
        address = backend.alloc(nbytes)
        assert address % 256 == 0
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
        backend.copy_h2d(data, address)
        back = bytearray(nbytes)
        backend.copy_d2h(address, memoryview(back))
        assert back == data
        backend.free(address)


def test_memory_that_is_not_there_names_what_is(backend):
    with pytest.raises(BudgetError, match="bytes are available"):
        backend.alloc(1 << 50)


def test_memory_that_is_expected_is_ready_and_still_free(library):
    backend, nbytes = open_backend(library, threads=1), 40 << 20
    assert isinstance(backend, Forewarned)
    backend.expect(nbytes)
    waiting = time.monotonic() + 20
    while backend._memory.ready < nbytes and time.monotonic() < waiting:
        time.sleep(0.01)
    assert backend._memory.ready == nbytes
    first = backend.alloc(30 << 20)
    assert backend._memory.ready == 10 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    backend.memset_async(first, 7, 30 << 20, backend.create_stream())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5
    second = backend.alloc(20 << 20)  # does not fit there
    backend.memset_async(second, 8, 20 << 20, backend.create_stream())
    found = bytearray(1)
    backend.copy_d2h(first + (30 << 20) - 1, memoryview(found))
    assert found == b"\x07"
    backend.close()
    assert backend._memory.ready == 0


def test_a_backend_may_be_closed_before_its_memory_is_ready(library):
    backend = open_backend(library, threads=1)
    backend.expect(1 << 50)  # far more than is there: a part of it
    backend.expect(1)  # too little to matter
    assert len(backend._memory._slabs) == 1
    assert backend._memory._slabs[0].nbytes <= 512 << 20
    backend.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "atlas-populate"]


@pytest.mark.parametrize("where", [-1, 1])
def test_copies_beyond_an_allocation_are_refused(backend, where):
    address = backend.alloc(64)
    with pytest.raises(DeviceError, match="no allocation holds that range"):
        backend.copy_h2d(bytes(64), address + where)
    with pytest.raises(DeviceError, match="no allocation begins there"):
        backend.free(address + where)


def test_pinned_memory_goes_both_ways(backend):
    stream = backend.create_stream()
    source, target = backend.alloc_pinned(16), backend.alloc_pinned(16)
    address, other = backend.alloc(16), backend.alloc(16)
    source[:] = bytes(range(16))
    backend.copy_h2d_async(source, address, stream)
    backend.copy_d2d_async(address, other, 16, stream)
    backend.copy_d2h_async(other, target, stream)
    assert bytes(target) == bytes(range(16))
    backend.memset_async(other, 0xFF, 8, stream)
    backend.copy_d2h_async(other, target, stream)
    assert bytes(target) == b"\xff" * 8 + bytes(range(8, 16))
    with pytest.raises(DeviceError, match="overlap"):
        backend.copy_d2d_async(address, address + 4, 8, stream)
    backend.free_pinned(source)
    with pytest.raises(DeviceError, match="alloc_pinned did not give it"):
        backend.free_pinned(memoryview(bytearray(16)))


def test_a_launch_runs_at_once_and_in_order(backend):
    counts = counts_of(backend, 5)
    x, read = floats(backend, np.arange(10).reshape(5, 2))
    stream = backend.create_stream()
    for tasks in (0, 1, 2, 50):
        before = read()
        backend.enqueue(add(backend, counts, x, x, x, 2, tasks), stream)
        np.testing.assert_array_equal(read(), before * 2)


def test_a_launch_runs_here_on_any_thread_beside_the_others(backend):
    assert isinstance(backend, HostRunner)
    rows, columns, threads = 7, 33, 4
    x, z = (np.random.default_rng(seed).standard_normal((rows, columns), np.float32) for seed in (1, 2))
    counts, (left, _), (right, _) = counts_of(backend, rows), floats(backend, x), floats(backend, z)
    made = [floats(backend, np.full((rows, columns), np.nan)) for _ in range(threads)]
    launches = [add(backend, counts, left, right, address, columns) for address, _ in made]
    recording = backend.create_stream()
    backend.begin_capture(recording)  # no stream has a part in it
    workers = [threading.Thread(target=backend.run_here, args=(launch,)) for launch in launches]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for _, read in made:
        np.testing.assert_array_equal(read(), x + z)
    backend.destroy_graph(backend.end_capture(recording))


def test_a_graph_replays_with_what_memory_holds_now(backend):
    counts = counts_of(backend, 2)
    x, _ = floats(backend, [[1, 2], [3, 4], [5, 6]])
    y, read = floats(backend, np.zeros((3, 2)))
    staging = backend.alloc_pinned(24)
    stream = backend.create_stream()
    backend.begin_capture(stream)
    assert backend.is_capturing(stream)
    backend.copy_h2d_async(staging, x, stream)
    backend.enqueue(add(backend, counts, x, x, y, 2), stream)
    backend.enqueue(add(backend, counts, y, x, y, 2), stream)
    graph = backend.end_capture(stream)
    assert not backend.is_capturing(stream)
    np.testing.assert_array_equal(read(), np.zeros((3, 2)))
    staging[:] = np.array([[1, 1], [2, 2], [9, 9]], np.float32).tobytes()
    backend.launch_graph(graph, stream)
    np.testing.assert_array_equal(read(), [[3, 3], [6, 6], [0, 0]])
    staging[:] = np.array([[4, 4], [5, 5], [6, 6]], np.float32).tobytes()
    backend.copy_h2d(np.array([3] + [0] * 7, np.int32).tobytes(), counts)
    backend.launch_graph(graph, stream)
    np.testing.assert_array_equal(read(), [[12, 12], [15, 15], [18, 18]])
    backend.destroy_graph(graph)
    backend.destroy_graph(graph)
    with pytest.raises(DeviceError, match="it was destroyed"):
        backend.launch_graph(graph, stream)


def test_commands_wait_for_the_ones_before(backend):
    """Thousands of dependent commands with many tasks: a thread that ran ahead would add to an old value."""
    rows = 64
    counts = counts_of(backend, rows)
    x, read = floats(backend, np.ones((rows, 1)))
    y, _ = floats(backend, np.zeros((rows, 1)))
    one, _ = floats(backend, np.ones((rows, 1)))
    stream = backend.create_stream()
    backend.begin_capture(stream)
    for _ in range(500):
        backend.enqueue(add(backend, counts, x, one, y, 1, 7), stream)
        backend.enqueue(add(backend, counts, y, one, x, 1, 5), stream)
    graph = backend.end_capture(stream)
    for replay in range(1, 6):
        backend.launch_graph(graph, stream)
        np.testing.assert_array_equal(read(), np.full((rows, 1), 1 + 1000 * replay))


def test_graphs_of_many_backends_at_once(library):
    """More threads than processors, and several callers: everything still comes to an end, and right."""
    results = {}

    def work(index):
        backend = open_backend(library, threads=4)
        counts = counts_of(backend, 32)
        x, read = floats(backend, np.full((32, 4), index))
        stream = backend.create_stream()
        backend.begin_capture(stream)
        for _ in range(10):
            backend.enqueue(add(backend, counts, x, x, x, 4, 8), stream)
        graph = backend.end_capture(stream)
        for _ in range(2):
            backend.launch_graph(graph, stream)
        results[index] = read()
        backend.destroy_graph(graph)
        backend.close()

    callers = [threading.Thread(target=work, args=(index,)) for index in range(1, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for index in range(1, 5):
        np.testing.assert_array_equal(results[index], np.full((32, 4), index * 2.0**20))


def test_an_idle_pool_does_not_spin(backend):
    counts = counts_of(backend, 8)
    x, _ = floats(backend, np.ones((8, 1)))
    backend.enqueue(add(backend, counts, x, x, x, 1, 8), backend.create_stream())
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.05


def test_events_measure_time(backend):
    stream = backend.create_stream()
    start, end = backend.create_event(timing=True), backend.create_event(timing=True)
    with pytest.raises(DeviceError, match="recorded"):
        backend.elapsed_us(start, end)
    backend.record_event(start, stream)
    time.sleep(0.01)
    backend.record_event(end, stream)
    backend.wait_event(end)
    assert backend.query_event(end)
    assert backend.elapsed_us(start, end) >= 10_000


def test_what_does_not_fit_a_capture_is_refused(backend):
    stream = backend.create_stream()
    backend.begin_capture(stream)
    for call in (
        lambda: backend.begin_capture(stream),
        lambda: backend.synchronize(stream),
        lambda: backend.record_event(backend.create_event(), stream),
    ):
        with pytest.raises(DeviceError, match="captured"):
            call()
    backend.launch_graph(backend.end_capture(stream), stream)
    with pytest.raises(DeviceError, match="none was begun"):
        backend.end_capture(stream)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((ptr(0),), "takes 6 arguments, got 1"),
        ((ptr(0), i32(0), ptr(0), ptr(0), f32(0), i32(1)), "parameter ptr<float> y was given"),
        ((ptr(0), i32(0), ptr(0), ptr(0), ptr(0), i32(1 << 31)), "holds whole numbers"),
    ],
)
def test_arguments_that_do_not_fit_are_named(backend, args, match):
    with pytest.raises(KernelError, match=match):
        backend.prepare_launch(backend.kernel("elementwise", "add"), Geometry(), args)


def test_geometry_of_a_gpu_is_refused(backend):
    kernel, args = backend.kernel("elementwise", "add"), (ptr(0), i32(0), ptr(0), ptr(0), ptr(0), i32(1))
    with pytest.raises(KernelError, match="only grid"):
        backend.prepare_launch(kernel, Geometry((1, 1, 1), (32, 1, 1)), args)
    with pytest.raises(DeviceError, match="clusters"):
        backend.prepare_launch(kernel, Geometry(), args, LaunchAttrs(overlap=True))
    launch = backend.prepare_launch(kernel, Geometry((2, 1, 1)), args)
    assert launch.description.startswith("elementwise.add[2](counts=0x0, live=0")


def test_an_unknown_kernel_names_the_known_ones(backend):
    with pytest.raises(KernelError, match="Declared modules: attention, attention_fast, elementwise"):
        backend.kernel("nothing", "add")
    with pytest.raises(KernelError, match="The module declares"):
        backend.kernel("elementwise", "nothing")


def test_opening_is_strict(library):
    with pytest.raises(DeviceError, match="no CPU 1"):
        open_backend(library, 1)
    with pytest.raises(UsageError, match="0 threads"):
        open_backend(library, threads=0)


def test_a_closed_backend_says_so(library):
    backend = open_backend(library, threads=2)
    stream = backend.create_stream()
    backend.begin_capture(stream)
    graph = backend.end_capture(stream)
    backend.close()
    backend.close()
    with pytest.raises(DeviceError, match="after it was closed"):
        backend.facts()
    with pytest.raises(DeviceError, match="it was destroyed"):
        backend.launch_graph(graph, stream)
    backend.destroy_graph(graph)
