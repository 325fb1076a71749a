"""Trials of a GpuBackend itself: memory, copies, streams, events, capture and replay, errors."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np

from atlas_core.conformance.results import Report, Result
from atlas_core.contracts.backend import GpuBackend, HostLink, HostRing, StepResults
from atlas_core.ops.step import Count
from atlas_core.runtime.capture import captured
from atlas_core.vocab.errors import AtlasError, BudgetError, DeviceError, KernelError

Check = Callable[[GpuBackend], "str | None"]
"""Gives a finding in one sentence, or None."""
_SIZE = 1000
_PATTERN = bytes(i * 7 % 251 for i in range(_SIZE))


def test_backend(backend: GpuBackend, checks: Mapping[str, Check] | None = None) -> Report:  # noqa: PT028 no test of pytest's
    """One result for each check, named ``backend[device](check)``. Leaves the backend open, and as it was unless a check fails."""
    name = backend.facts().name
    report = Report()
    for label, check in (checks or CHECKS).items():
        try:
            finding = check(backend)
        except AtlasError as error:
            finding = f"{type(error).__name__}: {error}"
        report.results.append(Result("backend", name, label, "failed" if finding else "passed", finding or ""))
    return report


def _bytes(backend: GpuBackend, address: int, nbytes: int = _SIZE) -> bytes:
    target = bytearray(nbytes)
    backend.copy_d2h(address, memoryview(target))
    return bytes(target)


def alignment(backend: GpuBackend) -> str | None:
    """Blocks of any size begin at multiples of 256 and do not overlap."""
    sizes = (1, 255, 256, 257, 5000)
    blocks = [(backend.alloc(size), size) for size in sizes]
    wrong = [f"{address:#x}" for address, _ in blocks if address % 256]
    spans = sorted((address, address + size) for address, size in blocks)
    overlap = any(end > start for (_, end), (start, _) in pairwise(spans))
    for address, _ in blocks:
        backend.free(address)
    if wrong:
        return f"blocks at {', '.join(wrong)} are not 256-byte aligned"
    return "two blocks overlap" if overlap else None


def too_much(backend: GpuBackend) -> str | None:
    """More memory than there is raises BudgetError, and the device is as good as before."""
    _, total = backend.memory()
    try:
        address = backend.alloc(2 * total)
    except BudgetError:
        backend.free(backend.alloc(_SIZE))
        return None
    backend.free(address)
    return f"{2 * total} bytes were given out of {total}"


def copies(backend: GpuBackend) -> str | None:
    """Bytes survive every kind of copy, at odd offsets too, and nothing else is touched."""
    first, second, stream = backend.alloc(_SIZE), backend.alloc(_SIZE), backend.create_stream()
    pinned = backend.alloc_pinned(_SIZE)
    try:
        backend.copy_h2d(_PATTERN, first)
        backend.copy_h2d(bytes(_SIZE), second)
        if _bytes(backend, first) != _PATTERN:
            return "what was copied to the device does not come back"
        backend.copy_d2d_async(first + 3, second + 7, 501, stream)
        backend.memset_async(second + 600, 0xAB, 33, stream)
        backend.synchronize(stream)
        want = bytes(7) + _PATTERN[3:504] + bytes(92) + b"\xab" * 33 + bytes(_SIZE - 633)
        if _bytes(backend, second) != want:
            return "a copy on the device or a memset left other bytes than meant"
        pinned[:] = _PATTERN[::-1]
        backend.copy_h2d_async(pinned[: _SIZE - 1], first, stream)
        backend.synchronize(stream)
        pinned[:] = bytes(_SIZE)
        backend.copy_d2h_async(first, pinned, stream)
        backend.synchronize(stream)
        if bytes(pinned) != _PATTERN[:0:-1] + _PATTERN[-1:]:
            return "asynchronous copies left other bytes than meant"
    finally:
        backend.free(first)
        backend.free(second)
        backend.free_pinned(pinned)
    return None


def order(backend: GpuBackend) -> str | None:
    """Work of one stream runs in order, and an event behind it means that it is done."""
    address, stream, event = backend.alloc(_SIZE), backend.create_stream(), backend.create_event()
    pinned = backend.alloc_pinned(_SIZE)
    try:
        backend.wait_event(event)  # never recorded: returns at once
        if not backend.query_event(event):
            return "an event that was never recorded is not done"
        for value in (1, 2, 3):
            backend.memset_async(address, value, _SIZE, stream)
        backend.copy_d2h_async(address, pinned, stream)
        backend.record_event(event, stream)
        backend.wait_event(event)
        if not backend.query_event(event):
            return "an event is not done although it was waited for"
        if bytes(pinned) != b"\x03" * _SIZE:
            return "work of one stream did not run in order, or was not done when its event was"
    finally:
        backend.synchronize(stream)
        backend.free(address)
        backend.free_pinned(pinned)
    return None


def replay(backend: GpuBackend) -> str | None:
    """Captured work runs at replay only, each time with the memory of that moment."""
    first, second, stream = backend.alloc(_SIZE), backend.alloc(_SIZE), backend.create_stream()
    try:
        backend.copy_h2d(bytes(_SIZE), second)
        backend.begin_capture(stream)
        capturing = backend.is_capturing(stream)
        backend.copy_d2d_async(first, second, _SIZE, stream)
        graph = backend.end_capture(stream)
        if not capturing or backend.is_capturing(stream):
            return "is_capturing does not tell what is the case"
        backend.synchronize(stream)
        if _bytes(backend, second) != bytes(_SIZE):
            return "captured work has run"
        for data in (_PATTERN, _PATTERN[::-1]):
            backend.copy_h2d(data, first)
            backend.launch_graph(graph, stream)
            backend.synchronize(stream)
            if _bytes(backend, second) != data:
                return "a replay did not use what was in memory then"
        backend.destroy_graph(graph)
    finally:
        backend.free(first)
        backend.free(second)
    return None


def timing(backend: GpuBackend) -> str | None:
    """Timing events exist exactly when the capabilities say so, and time does not run backwards."""
    if not backend.capabilities.event_timing:
        try:
            backend.create_event(timing=True)
        except DeviceError:
            return None
        return "gives a timing event, and capabilities.event_timing is False"
    address, stream = backend.alloc(_SIZE), backend.create_stream()
    start, end = backend.create_event(timing=True), backend.create_event(timing=True)
    backend.record_event(start, stream)
    backend.memset_async(address, 0, _SIZE, stream)
    backend.record_event(end, stream)
    backend.wait_event(end)
    backend.free(address)
    return None if backend.elapsed_us(start, end) >= 0 else "less than no time passed between two events"


def absence(backend: GpuBackend) -> str | None:
    """A kernel that does not exist is a KernelError that names it."""
    try:
        backend.kernel("no_such_module", "no_such_entry")
    except KernelError as error:
        named = "no_such_module" in str(error) or "no_such_entry" in str(error)
        return None if named else f"the error does not name the kernel: {error}"
    return "a kernel that does not exist was found"


def host_link(backend: GpuBackend) -> str | None:
    """Steps that are one graph find their inputs in place after place of the ring, and leave their results there."""
    if not backend.capabilities.host_link:
        return None
    if not isinstance(backend, HostLink):
        return "says that it has a host link, and lacks the methods of a HostLink"
    rows, wide, places, fixed, words = 3, 2, 2, 16, 4096
    turn, target = backend.alloc(4), backend.alloc(4 * words)
    sampled, values, ids = (backend.alloc(4 * rows * width) for width in (1, wide, wide))
    sent, received = backend.alloc_pinned(4 * words * places), backend.alloc_pinned(4 * rows * (1 + 2 * wide) * places)
    inputs, outputs = (np.frombuffer(memory, np.int32).reshape(places, -1) for memory in (sent, received))
    try:
        backend.copy_h2d(bytes(4), turn)
        for address, content in ((sampled, [7, 8, 9]), (values, range(50, 56)), (ids, [4, 5, -1, 6, 2, 3])):
            backend.copy_h2d(np.array(content, np.int32).tobytes(), address)
        stream = backend.create_stream()
        launches = (
            backend.prepare_fetch(HostRing(sent, places, turn), target, fixed),
            backend.prepare_deliver(
                HostRing(received, places, turn), StepResults(sampled, values, ids, target, rows, wide)
            ),
        )
        graph = captured(backend, launches, stream)
        for step, (updates, live) in enumerate(((0, 3), (1500, 2), (1, 1))):
            place = step % places
            inputs[place] = np.arange(words) * (step + 1)
            inputs[place, [Count.ROWS, Count.UPDATES]] = live, updates
            outputs[place] = -7
            backend.copy_h2d(bytes(4 * words), target)
            backend.launch_graph(graph, stream)
            backend.synchronize(stream)
            got = np.frombuffer(_bytes(backend, target, 4 * words), np.int32)
            count = fixed + 2 * updates
            if not np.array_equal(got[:count], inputs[place, :count]) or got[count:].any():
                return f"step {step} did not fetch the {count} live words of its place"
            want = np.full(outputs.shape[1], -7)
            want[:live] = [7, 8, 9][:live]
            want[rows : rows + live * wide] = [50, 51, -7, -7, 54, 55][: live * wide]
            want[rows * (1 + wide) :][: live * wide] = [4, 5, -1, -7, 2, 3][: live * wide]
            if not np.array_equal(outputs[place], want):
                return f"step {step} delivered {outputs[place].tolist()}, not {want.tolist()}"
        backend.destroy_graph(graph)
    finally:
        del inputs, outputs
        for address in (turn, target, sampled, values, ids):
            backend.free(address)
        backend.free_pinned(sent)
        backend.free_pinned(received)
    return None


CHECKS: Mapping[str, Check] = {
    "alignment": alignment, "too much memory": too_much, "copies": copies, "order": order, "replay": replay,
    "timing": timing, "absent kernel": absence, "host link": host_link,
}  # fmt: skip
