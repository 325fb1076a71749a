"""Launches as one graph."""

from collections.abc import Iterable
from contextlib import suppress

from atlas_core.contracts.backend import GpuBackend, Graph, Launch, Stream
from atlas_core.vocab.errors import DeviceError


def captured(backend: GpuBackend, launches: Iterable[Launch], stream: Stream) -> Graph:
    """The graph of ``launches``, in their order. The stream captures no more afterwards, whatever happens.

    Raises DeviceError naming the launch that the driver refuses.
    """
    backend.begin_capture(stream)
    try:
        for launch in launches:
            backend.enqueue(launch, stream)
    except BaseException:
        # A driver may say of a capture in which something failed that something has failed: what it was is being raised.
        with suppress(DeviceError):
            backend.destroy_graph(backend.end_capture(stream))
        raise
    return backend.end_capture(stream)
