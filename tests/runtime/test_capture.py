"""Launches as one graph, on a device that refuses one of them."""

import pytest

from atlas_core.runtime.capture import captured
from atlas_core.runtime.null import NullBackend
from atlas_core.vocab.errors import DeviceError
from atlas_core.vocab.kernel import Geometry


class Refusing(NullBackend):
    """Refuses every launch of ``large``; like a GPU's driver it then ends the capture with an error of its own, if it is ``strict``."""

    def __init__(self, *, strict):
        super().__init__()
        self.strict, self.broken, self.destroyed = strict, False, []

    def enqueue(self, launch, stream):
        if launch.entry == "large":
            self.broken = True
            raise DeviceError(f"Launching {launch.description}", "too many blocks")
        super().enqueue(launch, stream)

    def end_capture(self, stream):
        graph = super().end_capture(stream)
        if self.broken and self.strict:
            raise DeviceError("Ending a capture", "something has failed")
        return graph

    def destroy_graph(self, graph):
        self.destroyed.append(graph)
        super().destroy_graph(graph)


def launches(backend, *entries):
    return [backend.prepare_launch(backend.kernel("m", entry), Geometry((1, 1, 1)), ()) for entry in entries]


@pytest.mark.parametrize("strict", [False, True])
def test_the_launch_that_was_refused_is_named(strict):
    backend = Refusing(strict=strict)
    stream = backend.create_stream()
    with pytest.raises(DeviceError, match=r"Launching m:large grid=\(1, 1, 1\)"):
        captured(backend, launches(backend, "small", "large", "small"), stream)
    assert not backend.is_capturing(stream)
    assert len(backend.destroyed) == (not strict)
    backend.broken = False
    graph = captured(backend, launches(backend, "small", "small"), stream)
    assert [launch.entry for launch in graph.launches] == ["small", "small"]


def test_an_end_that_fails_by_itself_is_told():
    backend = Refusing(strict=True)
    backend.broken = True
    stream = backend.create_stream()
    with pytest.raises(DeviceError, match="Ending a capture"):
        captured(backend, launches(backend, "small"), stream)
