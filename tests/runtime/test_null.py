"""The null device: real addresses and copies, nothing computed, everything checked."""

import pytest

from atlas_core.contracts.backend import GpuBackend
from atlas_core.runtime.null import Injection, NullBackend
from atlas_core.runtime.single import SingleComm
from atlas_core.runtime.trace import TraceBackend
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import BudgetError, DeviceError, KernelError
from atlas_core.vocab.kernel import Geometry, i32, ptr


def launch_of(backend, address, value=1):
    return backend.prepare_launch(backend.kernel("m", "e"), Geometry((2, 1, 1)), [ptr(address), i32(value)])


def test_it_is_a_backend_and_so_is_a_trace_of_it():
    assert isinstance(NullBackend(), GpuBackend)
    assert isinstance(TraceBackend(NullBackend(), print), GpuBackend)


def test_memory_holds_what_was_copied_and_is_counted():
    backend = NullBackend(total_memory=4096)
    a, b = backend.alloc(100), backend.alloc(100)
    assert a % 256 == b % 256 == 0
    assert backend.memory() == (3896, 4096)
    stream = backend.create_stream()
    backend.copy_h2d(bytes(range(100)), a)
    backend.copy_d2d_async(a + 10, b, 5, stream)
    backend.memset_async(b + 1, 255, 2, stream)
    target = memoryview(bytearray(5))
    backend.copy_d2h(b, target)
    assert bytes(target) == bytes([10, 255, 255, 13, 14])
    assert bytes(backend.view(a + 98, 2)) == bytes([98, 99])
    backend.free(a)
    assert backend.memory()[0] == 3996


WRONG = {
    "a copy too long": lambda backend, a: backend.copy_h2d(bytes(101), a),
    "a read too early": lambda backend, a: backend.copy_d2h(a - 1, memoryview(bytearray(1))),
    "a memset too late": lambda backend, a: backend.memset_async(a + 99, 0, 2, backend.create_stream()),
    "an overlapping copy": lambda backend, a: backend.copy_d2d_async(a, a + 5, 10, backend.create_stream()),
    "a free inside a block": lambda backend, a: backend.free(a + 1),
    "an argument behind a block": lambda backend, a: launch_of(backend, a + 100),
    "a view too long": lambda backend, a: backend.view(a, 101),
    "a foreign pinned block": lambda backend, a: backend.free_pinned(memoryview(bytearray(4))),
    "a timing event": lambda backend, a: backend.create_event(timing=True),
    "the end of no capture": lambda backend, a: backend.end_capture(backend.create_stream()),
    "an empty block": lambda backend, a: backend.alloc(0),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_an_error(wrong):
    backend = NullBackend()
    with pytest.raises(DeviceError):
        wrong(backend, backend.alloc(100))


def test_freed_memory_is_no_memory():
    backend = NullBackend()
    address = backend.alloc(64)
    backend.free(address)
    with pytest.raises(DeviceError, match="not allocated"):
        backend.copy_h2d(b"x", address)
    with pytest.raises(DeviceError, match="freed"):
        backend.free(address)


def test_running_out_names_the_free_bytes():
    backend = NullBackend(total_memory=1000)
    backend.alloc(600)
    with pytest.raises(BudgetError, match="400 of 1000 bytes are free"):
        backend.alloc(401)


def test_kernels_that_are_not_listed_are_missing():
    backend = NullBackend(kernels=[("m", "e")])
    assert backend.kernel("m", "e") == ("m", "e")
    with pytest.raises(KernelError, match="m:other"):
        backend.kernel("m", "other")


def test_synchronous_work_is_done_on_return_and_asynchronous_when_somebody_waits():
    for asynchronous in (False, True):
        backend = NullBackend(asynchronous=asynchronous)
        address, stream, event = backend.alloc(4), backend.create_stream(), backend.create_event()
        backend.copy_h2d(bytes(4), address)
        backend.memset_async(address, 7, 4, stream)
        backend.record_event(event, stream)
        backend.memset_async(address, 9, 4, stream)
        assert backend.view(address, 1)[0] == (0 if asynchronous else 9)
        backend.wait_event(event)
        assert backend.view(address, 1)[0] == (7 if asynchronous else 9)
        backend.synchronize(stream)
        assert backend.view(address, 1)[0] == 9


def test_asynchronous_copies_read_their_source_when_they_run():
    backend = NullBackend(asynchronous=True)
    address, stream, pinned = backend.alloc(1), backend.create_stream(), backend.alloc_pinned(1)
    pinned[0] = 1
    backend.copy_h2d_async(pinned, address, stream)
    pinned[0] = 2  # too early: the mistake that the double must show
    backend.synchronize(stream)
    assert backend.view(address, 1)[0] == 2
    backend.free_pinned(pinned)


def test_polling_an_event_ends():
    backend = NullBackend(asynchronous=True)
    stream, event = backend.create_stream(), backend.create_event()
    assert backend.query_event(event)  # never recorded
    address = backend.alloc(8)
    for _ in range(3):
        backend.memset_async(address, 1, 8, stream)
    backend.record_event(event, stream)
    assert [backend.query_event(event) for _ in range(4)] == [False, False, False, True]


def test_a_graph_replays_with_the_memory_of_now_and_calls_back():
    seen = []
    backend = NullBackend()
    backend.injection = Injection(
        on_launch=lambda launch: seen.append(launch.entry), on_graph=lambda graph: seen.append(len(graph.launches))
    )
    a, b, stream = backend.alloc(4), backend.alloc(4), backend.create_stream()
    backend.begin_capture(stream)
    assert backend.is_capturing(stream)
    backend.copy_d2d_async(a, b, 4, stream)
    backend.enqueue(launch_of(backend, a), stream)
    with pytest.raises(DeviceError, match="captured"):
        backend.synchronize(stream)
    graph = backend.end_capture(stream)
    assert not seen
    for value in (3, 5):
        backend.copy_h2d(bytes([value]) * 4, a)
        backend.launch_graph(graph, stream)
        assert backend.view(b, 4)[0] == value
    assert seen == ["e", 1, "e", 1]
    assert (backend.submissions, len(backend.launches)) == (2, 2)
    backend.destroy_graph(graph)
    with pytest.raises(DeviceError, match="destroyed"):
        backend.launch_graph(graph, stream)


@pytest.mark.parametrize("sticky", [False, True])
def test_failures_come_when_they_are_told_to(sticky):
    backend = NullBackend(injection=Injection(fail_at=2, sticky=sticky))
    launch, stream = launch_of(backend, backend.alloc(4)), backend.create_stream()
    backend.enqueue(launch, stream)
    with pytest.raises(DeviceError, match=r"m:e grid=\(2, 1, 1\)") as caught:
        backend.enqueue(launch, stream)
    assert caught.value.sticky is sticky
    if sticky:
        with pytest.raises(DeviceError, match="the device is lost") as caught:
            backend.alloc(4)
        assert caught.value.sticky
    else:
        backend.enqueue(launch, stream)
        assert len(backend.launches) == 2


def test_trace_tells_before_it_launches_and_names_every_node_of_a_replay():
    lines = []
    inner = NullBackend(injection=Injection(fail_at=3))
    backend = TraceBackend(inner, lines.append)
    address, stream = backend.alloc(4), backend.create_stream()
    launch = launch_of(backend, address, 42)
    backend.enqueue(launch, stream)
    backend.begin_capture(stream)
    backend.enqueue(launch, stream)
    graph = backend.end_capture(stream)
    backend.launch_graph(graph, stream)
    with pytest.raises(DeviceError):
        backend.enqueue(launch, stream)
    text = f"m:e grid=(2, 1, 1) block=(1, 1, 1) (ptr {address:#x}, i32 42)"
    assert lines == [f"launch {text}", f"capture {text}", f"replay 1/1 {text}", f"launch {text}"]


def test_one_rank_alone_moves_what_must_move_and_knows_nobody():
    backend = NullBackend()
    a, b, stream = backend.alloc(8), backend.alloc(8), backend.create_stream()
    comm = SingleComm(backend)
    backend.copy_h2d(b"12345678", a)
    comm.all_reduce(a, 2, DType.F32, stream)
    comm.all_gather(a, b, 1, DType.F32, stream)
    assert bytes(backend.view(b, 4)) == b"1234"
    comm.reduce_scatter(a, b, 2, DType.F32, stream)
    assert bytes(backend.view(b, 8)) == bytes(backend.view(a, 8)) == b"12345678"
    comm.group_start()
    comm.group_end()
    for call in (
        lambda: comm.send(a, 1, DType.F32, 1, stream), lambda: comm.recv(a, 1, DType.F32, 0, stream),
        lambda: comm.broadcast(a, 1, DType.F32, 2, stream), comm.group_end,
    ):  # fmt: skip
        with pytest.raises(DeviceError):
            call()
    assert (comm.rank, comm.world_size, comm.healthy()) == (0, 1, True)
