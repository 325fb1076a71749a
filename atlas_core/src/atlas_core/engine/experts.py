"""How many distinct experts mixtures read in a step of decoding (``--count-experts``)."""

from collections.abc import Mapping, Sequence

import numpy as np

from atlas_core.contracts.backend import GpuBackend, Stream
from atlas_core.contracts.ops import Buffer
from atlas_core.engine.rings import DEPTH

_WORD = 4


class ExpertCount:
    """Brings what routers chose back to the host behind each step of decoding; two copies a mixture cost some microseconds each."""

    def __init__(self, backend: GpuBackend, names: Sequence[str], rows: int, activations: Mapping[str, Buffer]) -> None:
        """``names`` are activations [T, chosen] int32, one a mixture; ``activations`` those of a bucket of ``rows`` tokens, the most counted."""
        self._backend = backend
        self._names = tuple(names)
        self._rows = rows
        self._chosen = activations[self._names[0]].nbytes // rows // _WORD
        self._memory = backend.alloc_pinned(DEPTH * len(self._names) * rows * self._chosen * _WORD)
        self._parts = np.frombuffer(self._memory, np.int32).reshape(DEPTH, len(self._names), -1)

    def fetch(self, number: int, tokens: int, activations: Mapping[str, Buffer], stream: Stream) -> None:
        """Queue the copies of step ``number``, behind it."""
        for name, part in zip(self._names, self._parts[number % DEPTH], strict=True):
            target = part[: tokens * self._chosen].view(np.uint8).data
            self._backend.copy_d2h_async(activations[name].address, target, stream)

    def read(self, number: int, tokens: int) -> tuple[int, int]:
        """(distinct experts of all mixtures together, mixtures) of a step whose copies are done."""
        parts = self._parts[number % DEPTH, :, : tokens * self._chosen]
        return sum(len(np.unique(part)) for part in parts), len(parts)

    def free(self) -> None:
        """Give the memory back; nothing queued may use it any more."""
        del self._parts
        self._backend.free_pinned(self._memory)
