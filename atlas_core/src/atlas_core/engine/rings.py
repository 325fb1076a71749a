"""Page-locked memory that steps use in turn: inputs on their way to the device, results on their way back."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from atlas_core.contracts.backend import Event, GpuBackend, HostLink, HostRing, Launch, StepResults
from atlas_core.contracts.ops import Buffer
from atlas_core.engine.inputs import InputLayout
from atlas_core.model.planner import Bucket
from atlas_core.vocab.errors import DeviceError
from atlas_core.vocab.sampling import MAX_TOP_LOGPROBS

DEPTH = 2
"""Steps in flight: one is computed while the next one waits behind it."""
WIDE = 1 + MAX_TOP_LOGPROBS
_WORD = 4


class Results(Struct, frozen=True):
    """Names of the program's results, in the order in which model.builder records them; behind them ``experts``, where they are counted."""

    sampled: str
    logprob_values: str
    logprob_ids: str
    logits: str
    experts: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> "Results":
        """From all names, in that order."""
        sampled, values, ids, logits, *experts = names
        return cls(sampled, values, ids, logits, tuple(experts))


class Place:
    """One step's part: its input block, its results, masks of restricted slots, and the event behind all of it."""

    def __init__(
        self, event: Event, inputs: memoryview, results: memoryview, masks: memoryview, rows: int, words: int
    ) -> None:
        self.event = event
        self.busy = False
        self.inputs = inputs
        self.block: npt.NDArray[np.int32] = np.frombuffer(inputs, np.int32)
        self.mask_bytes = masks
        self.masks: npt.NDArray[np.uint32] = np.frombuffer(masks, np.uint32).reshape(-1, words)
        self._results = results
        self._rows = rows

    def release(self) -> None:
        """Let go of the memory."""
        del self.block, self.masks

    def views(self, rows: int) -> tuple[memoryview, memoryview, memoryview]:
        """Where ``rows`` sampled ids, log-probabilities and their ids lie."""
        first, second = self._rows * _WORD, self._rows * (1 + WIDE) * _WORD
        wide = rows * WIDE * _WORD
        return self._results[: rows * _WORD], self._results[first : first + wide], self._results[second : second + wide]


class Rings:
    """The places of all steps. ``linked`` tells that kernels use them in place (contracts.backend.HostLink).

    ``mask`` is the state of token masks, [slots, words] of uint32.
    """

    def __init__(self, backend: GpuBackend, buckets: Sequence[Bucket], mask: Buffer, vocab_size: int) -> None:
        self._backend = backend
        self._link = _link(backend)
        self._rows = rows = max(1, *(bucket.rows for bucket in buckets))
        words = -(-vocab_size // 32)
        nbytes = (
            max(-(-InputLayout(bucket).nbytes // 64) * 64 for bucket in buckets),
            rows * (1 + 2 * WIDE) * _WORD,
            mask.nbytes // (words * _WORD) * words * _WORD,
        )
        self._memory = [backend.alloc_pinned(DEPTH * n) for n in nbytes]
        self._turn = backend.alloc(_WORD)
        backend.copy_h2d(bytes(_WORD), self._turn)
        self.places = [Place(backend.create_event(), *self._parts(index), rows, words) for index in range(DEPTH)]

    def _parts(self, index: int) -> tuple[memoryview, memoryview, memoryview]:
        """One place's part of each ring."""
        sent, received, masks = (
            memory[index * memory.nbytes // DEPTH : (index + 1) * memory.nbytes // DEPTH] for memory in self._memory
        )
        return sent, received, masks

    @property
    def linked(self) -> bool:
        """Whether graphs framed by ``frame`` need no copies."""
        return self._link is not None

    def frame(self, inputs: int, bucket: Bucket, results: Results) -> "LinkFrame | None":
        """What brings a bucket's inputs to the device block at ``inputs`` and the results back; None where copies must do that."""
        if self._link is None:
            return None
        rings = [HostRing(memory, DEPTH, self._turn) for memory in self._memory[:2]]
        fixed = InputLayout(bucket).offsets["updates"] // _WORD
        return LinkFrame(self._link, rings[0], rings[1], inputs, fixed, results, self._rows)

    def free(self) -> None:
        """Give all memory back; nothing queued may use it any more. Safe to call twice."""
        if not self._memory:
            return
        for place in self.places:
            place.release()
        self.places.clear()
        for memory in self._memory:
            self._backend.free_pinned(memory)
        self._memory = []
        self._backend.free(self._turn)


class LinkFrame(Struct, frozen=True):
    """A runtime.bound.Frame."""

    link: HostLink
    sent: HostRing
    received: HostRing
    inputs: int
    fixed: int
    results: Results
    rows: int

    def begin(self) -> Sequence[Launch]:
        """See Frame."""
        return (self.link.prepare_fetch(self.sent, self.inputs, self.fixed),)

    def end(self, activations: Mapping[str, Buffer], counts: int) -> Sequence[Launch]:
        """See Frame."""
        names = self.results
        sampled, values, ids = (
            activations[n].address for n in (names.sampled, names.logprob_values, names.logprob_ids)
        )
        return (self.link.prepare_deliver(self.received, StepResults(sampled, values, ids, counts, self.rows, WIDE)),)


def _link(backend: GpuBackend) -> HostLink | None:
    if not backend.capabilities.host_link:
        return None
    if not isinstance(backend, HostLink):
        raise DeviceError(
            f"{type(backend).__name__} says that its kernels reach page-locked memory",
            "it lacks the methods of a HostLink",
            "this is a fault of the hardware plugin",
        )
    return backend
