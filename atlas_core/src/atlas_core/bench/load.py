"""Asking: one thread for each request that may be under way."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, Protocol

from atlas_core.bench.sample import Sample, read_sample
from atlas_core.bench.workload import Workload
from atlas_core.vocab.errors import AtlasError

Heard = Callable[[Sample], None]


class Server(Protocol):
    """Who is asked; see remote.RemoteServer."""

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. Raises AtlasError."""
        ...


def put_load(
    server: Server, workload: Workload, heard: Heard, clock: Callable[[], float] = time.perf_counter
) -> list[Sample]:
    """Send the whole workload and wait for every answer. A request that fails is a sample with its error.

    ``heard`` is called in this thread with each sample as it comes. An interrupt leaves what is under way behind.
    """
    done: SimpleQueue[Sample] = SimpleQueue()
    start = clock()
    line = _Line((start + due, body) for due, body in zip(workload.arrivals(), workload.bodies(), strict=True))

    def work() -> None:
        while (item := line.next()) is not None:
            due, body = item
            time.sleep(max(0.0, due - clock()))
            done.put(_ask(server, workload.path, body, due if workload.rate is not None else None, clock))

    for number in range(min(workload.concurrency, workload.requests)):
        threading.Thread(target=work, name=f"atlas-bench-{number}", daemon=True).start()
    samples = []
    for _ in range(workload.requests):
        samples.append(done.get())
        heard(samples[-1])
    return samples


class _Line:
    """An iterator that threads may share."""

    def __init__(self, items: Iterator[tuple[float, dict[str, Any]]]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def next(self) -> tuple[float, dict[str, Any]] | None:
        with self._lock:
            return next(self._items, None)


def _ask(server: Server, path: str, body: Mapping[str, Any], due: float | None, clock: Callable[[], float]) -> Sample:
    sent = clock()
    due = sent if due is None else due
    try:
        return read_sample(server.stream(path, body), due, sent, clock)
    except AtlasError as error:
        return Sample(due, sent, clock(), error=error.what)
    except Exception as error:  # noqa: BLE001 - whatever a strange answer leads to is one failed request, and shown
        return Sample(due, sent, clock(), error=f"{type(error).__name__}: {error}")
