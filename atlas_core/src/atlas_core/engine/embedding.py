"""Runs prompts for their vectors: replay FORWARD, read the hidden states back, pool them."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from atlas_core.contracts.backend import GpuBackend, Stream
from atlas_core.contracts.ops import Buffer
from atlas_core.engine.inputs import InputLayout, InputWriter
from atlas_core.engine.loop import StepOutput
from atlas_core.engine.runner import FORWARD, CapturedStep
from atlas_core.model.planner import Bucket
from atlas_core.model.program import Value
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.ops.step import SlotLayout, Word
from atlas_core.scheduler.plan import StepPlan
from atlas_core.scheduler.sequence import Sequence as Running
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import EngineError


class _Sum(Struct):
    """What is pooled of a prompt so far: a sum of ``count`` vectors, float64."""

    total: npt.NDArray[np.float64]
    count: int = 0


class EmbeddingRunner:
    """A StepRunner whose steps give, in place of tokens, the vector of every prompt that ends in them.

    ``steps`` are (bucket, captured step) as for a Runner, of a program whose one result ``hidden`` is [T, size]. A step is over when
    ``launch`` returns; a prompt may come in several of them. Nothing on the device counts positions, since nothing is sampled there:
    they are written with each piece of a prompt but the first.
    """

    asynchronous = False

    def __init__(
        self, backend: GpuBackend, stream: Stream, steps: Sequence[tuple[Bucket, CapturedStep]], *, inputs: int, slots: Buffer,
        layout: SlotLayout, hidden: Value, pooling: Literal["last", "cls", "mean"],
    ) -> None:  # fmt: skip
        """``inputs`` is the device block of InputLayout; ``slots``, the state of that name, is zeroed here."""
        ordered = sorted(steps, key=lambda step: step[0].tokens)
        self._steps = [(InputWriter(InputLayout(bucket)), step) for bucket, step in ordered]
        self._backend = backend
        self._stream = stream
        self._inputs = inputs
        self._layout = layout
        self._hidden = hidden.name
        self._size = int(hidden.shape[1])
        self._dtype = numpy_dtype(hidden.dtype or DType.F32)
        self._pooling = pooling
        self._sums: dict[Running, _Sum] = {}
        nbytes = max(-(-InputLayout(bucket).nbytes // 4) * 4 for bucket, _ in ordered)
        rows = max(bucket.tokens for bucket, _ in ordered)
        self._sent = backend.alloc_pinned(nbytes)
        self._received = backend.alloc_pinned(rows * self._size * self._dtype.itemsize)
        self._open = True
        backend.memset_async(slots.address, 0, slots.nbytes, stream)
        backend.synchronize(stream)

    def launch(self, plan: StepPlan) -> StepOutput:
        """Run a step. Raises EngineError when no bucket holds it, DeviceError."""
        first = [sequence.computed - n for sequence, n in zip(plan.sequences, np.diff(plan.cu_q).tolist(), strict=True)]
        told = tuple(
            (self._layout.word(slot, Word.POSITION), position)
            for slot, position in zip(plan.row_slot, first, strict=True)
            if position
        )
        plan = replace(plan, updates=(*plan.updates, *told))
        writer, step = self._choose(plan)
        live = writer.write(plan, np.frombuffer(self._sent, np.int32))
        self._backend.copy_h2d_async(self._sent[:live], self._inputs, self._stream)
        step.launch(FORWARD, self._stream)
        self._pool(plan, first, step.activations[self._hidden].address)
        return StepOutput([0] * len(plan.sample_row), None, self._vectors(plan))

    def kind(self, ticket: StepOutput) -> None:
        """None: no step is in flight whose end could be predicted."""

    def wait(self, ticket: StepOutput) -> None:
        """``launch`` has waited."""

    def collect(self, ticket: StepOutput) -> StepOutput:
        """What ``launch`` has found."""
        return ticket

    def sample(self, ticket: StepOutput) -> None:
        """Nothing is sampled."""

    def close(self) -> None:
        """Wait for the device, then give graphs and memory back. Safe to call twice."""
        if not self._open:
            return
        self._open = False
        self._backend.synchronize(self._stream)
        for _, step in self._steps:
            step.destroy()
        self._backend.free_pinned(self._sent)
        self._backend.free_pinned(self._received)

    def _choose(self, plan: StepPlan) -> tuple[InputWriter, CapturedStep]:
        for writer, step in self._steps:
            if writer.fits(plan):
                return writer, step
        raise EngineError(
            f"no captured step holds {len(plan.token_ids)} tokens of {len(plan.row_slot)} prompts",
            f"the largest bucket is {self._steps[-1][0].bucket}", "the buckets must cover the scheduler's limits",
        )  # fmt: skip

    def _pool(self, plan: StepPlan, first: Sequence[int], address: int) -> None:
        """Add what the step found to the prompts' sums."""
        for sequence in [sequence for sequence in self._sums if sequence.finished]:
            del self._sums[sequence]
        wanted = []  # (sequence, its first row, the row behind its last)
        for sequence, start, end, position in zip(plan.sequences, plan.cu_q, plan.cu_q[1:], first, strict=False):
            if not position:
                self._sums[sequence] = _Sum(np.zeros(self._size))
            ends = not sequence.prefilling
            if self._pooling == "mean":
                wanted.append((sequence, start, end))
            elif self._pooling == "cls" and not position:
                wanted.append((sequence, start, start + 1))
            elif self._pooling == "last" and ends:
                wanted.append((sequence, end - 1, end))
        width = self._size * self._dtype.itemsize
        for _, start, end in wanted:
            self._backend.copy_d2h_async(
                address + start * width, self._received[start * width : end * width], self._stream
            )
        self._backend.synchronize(self._stream)
        rows = np.frombuffer(self._received, self._dtype).reshape(-1, self._size)
        for sequence, start, end in wanted:
            pooled = self._sums[sequence]
            pooled.total += rows[start:end].astype(np.float64).sum(axis=0)
            pooled.count += end - start

    def _vectors(self, plan: StepPlan) -> list[bytes]:
        """The vector of each sampled row, float32, little endian."""
        found = []
        for row in plan.sample_row:
            pooled = self._sums.pop(plan.sequences[row])
            found.append((pooled.total / pooled.count).astype("<f4").tobytes())
        return found
