"""Runs step plans on a device: pack the inputs, replay FORWARD and SAMPLE, bring the results back."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from atlas_core.contracts.backend import GpuBackend, Stream
from atlas_core.contracts.ops import Buffer
from atlas_core.engine.experts import ExpertCount
from atlas_core.engine.inputs import InputLayout, InputWriter
from atlas_core.engine.loop import StepOutput
from atlas_core.engine.output import Alternatives
from atlas_core.engine.rings import DEPTH, WIDE, Place, Results, Rings
from atlas_core.model.planner import Bucket
from atlas_core.ops.references import PROMPT_BIT
from atlas_core.runtime.bound import WHOLE
from atlas_core.scheduler.plan import StepPlan
from atlas_core.vocab.errors import DeviceError, EngineError

FORWARD, SAMPLE = "forward", "sample"
_WORD = 4


class CapturedStep(Protocol):
    """One bucket's graphs (a runtime.bound.BoundStep)."""

    @property
    def activations(self) -> Mapping[str, Buffer]:
        """Buffers of the activations, results among them."""
        ...

    def launch(self, segment: str, stream: Stream) -> None:
        """Replay a segment."""
        ...

    def destroy(self) -> None:
        """Give the graphs back."""
        ...


class Ticket(Struct, frozen=True):
    """A launched step. ``number`` counts launches from 0."""

    number: int
    ring: Place
    step: CapturedStep
    bucket: Bucket
    rows: int
    plan: StepPlan

    @property
    def decodes(self) -> bool:
        """Whether every row has one token."""
        return self.plan.max_query == 1


class Runner:
    """Owns the pinned rings and the order of work on one stream.

    ``steps`` are (bucket, captured step), each bound to the buffers of ``InputLayout(bucket)`` in the device block at
    ``inputs``. ``states`` (slots, penalty, mask) are zeroed here; ``penalty`` is [rows, vocabulary] int32. ``rings`` are those whose
    frame the steps were captured in; the runner frees them.
    """

    def __init__(
        self, backend: GpuBackend, stream: Stream, steps: Sequence[tuple[Bucket, CapturedStep]], *, inputs: int,
        states: Mapping[str, Buffer], vocab_size: int, results: Results, rings: Rings,
    ) -> None:  # fmt: skip
        ordered = sorted(steps, key=lambda step: (step[0].tokens, step[0].max_query, step[0].sequences, step[0].rows))
        layouts = [InputLayout(bucket) for bucket, _ in ordered]
        self._backend = backend
        self._stream = stream
        self._steps = [(InputWriter(layout), step) for layout, (_, step) in zip(layouts, ordered, strict=True)]
        self._inputs = inputs
        self._penalty = states["penalty"]
        self._masks = states["mask"]
        self._vocab_size = vocab_size
        self._results = results
        self._launched = 0
        self._ended = 0  # steps that were waited for
        self._collected = 0
        self._rings = rings
        decoding = [step for step in ordered if step[0].max_query == 1] or ordered
        rows, largest = decoding[-1][0].tokens, decoding[-1][1].activations
        self._experts = ExpertCount(backend, results.experts, rows, largest) if results.experts else None
        for state in states.values():
            backend.memset_async(state.address, 0, state.nbytes, stream)
        backend.synchronize(stream)

    @property
    def asynchronous(self) -> bool:
        """Whether a step goes on after ``launch`` has returned."""
        return self._backend.capabilities.asynchronous

    def launch(self, plan: StepPlan) -> Ticket:
        """Begin a step in the smallest bucket that fits; one that is late goes on with ``sample``.

        Raises EngineError when none does or two steps are in flight already, DeviceError when the device refuses.
        """
        ring = self._rings.places[self._launched % DEPTH]
        if ring.busy:
            raise EngineError(f"step {self._launched} is launched", f"{DEPTH} steps in flight have not been collected")
        writer, step = self._choose(plan)
        ticket = Ticket(self._launched, ring, step, writer.bucket, len(plan.sample_row), plan)
        whole = self._rings.linked and not plan.late and not plan.masks
        try:
            self._enqueue(plan, ring, writer)
            step.launch(WHOLE if whole else FORWARD, self._stream)
            if whole:
                self._finish(ticket)
        except DeviceError as error:
            raise _failed(f"step {self._launched} cannot be launched", writer.bucket, error) from error
        ring.busy = True
        self._launched += 1
        if not whole and not plan.late:
            self.sample(ticket)
        return ticket

    def _enqueue(self, plan: StepPlan, ring: Place, writer: InputWriter) -> None:
        """Write the inputs, and copy them where the graphs do not fetch them themselves."""
        backend, stream = self._backend, self._stream
        live = writer.write(plan, ring.block)
        if not self._rings.linked:
            backend.copy_h2d_async(ring.inputs[:live], self._inputs, stream)
        row_bytes = self._vocab_size * _WORD
        for row in plan.clear_penalty:
            backend.memset_async(self._penalty.address + row * row_bytes, 0, row_bytes, stream)
        for row, prompt, generated in plan.counted:
            # At once: no step in flight knows the row.
            counts = np.bincount(generated, minlength=self._vocab_size).astype(np.int32)
            counts[list(prompt)] |= PROMPT_BIT
            backend.copy_h2d(counts.data.cast("B"), self._penalty.address + row * row_bytes)

    def sample(self, ticket: Ticket) -> None:
        """Bring the masks while the device is busy with FORWARD, replay SAMPLE, and have the results copied; see StepRunner."""
        try:
            self._write_masks(ticket.plan, ticket.ring)
            ticket.step.launch(SAMPLE, self._stream)
            if not self._rings.linked:
                self._copy_results(ticket)
            self._finish(ticket)
        except DeviceError as error:
            raise _failed(f"step {ticket.number} cannot be launched", ticket.bucket, error) from error

    def _finish(self, ticket: Ticket) -> None:
        """What comes behind the graphs of a step."""
        if self._experts is not None and ticket.decodes:
            tokens = len(ticket.plan.token_ids)
            self._experts.fetch(ticket.number, tokens, ticket.step.activations, self._stream)
        self._backend.record_event(ticket.ring.event, self._stream)

    def _copy_results(self, ticket: Ticket) -> None:
        """Into the ring, behind the graphs that do not deliver them themselves."""
        if not ticket.rows:
            return
        names = (self._results.sampled, self._results.logprob_values, self._results.logprob_ids)
        wanted = list(zip(names, ticket.ring.views(ticket.rows), strict=True))
        for name, target in wanted if ticket.plan.logprobs else wanted[:1]:
            self._backend.copy_d2h_async(ticket.step.activations[name].address, target, self._stream)

    def kind(self, ticket: Ticket) -> Bucket | None:
        """The bucket: its graphs are the same each time; None where masks are waited for between them."""
        return None if ticket.plan.masks else ticket.bucket

    def wait(self, ticket: Ticket) -> None:
        """Wait for the oldest step in flight.

        Raises EngineError for another ticket, DeviceError.
        """
        if ticket.number != self._collected or not ticket.ring.busy:
            raise EngineError(f"step {ticket.number} is collected", f"the oldest step in flight is {self._collected}")
        if self._ended > ticket.number:
            return
        try:
            self._backend.wait_event(ticket.ring.event)
        except DeviceError as error:
            raise _failed(f"step {ticket.number} has failed", ticket.bucket, error) from error
        self._ended = ticket.number + 1

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the oldest step in flight and read what it sampled; raises what ``wait`` does."""
        self.wait(ticket)
        sampled, values, ids = ticket.ring.views(ticket.rows)
        counted = self._experts if ticket.decodes else None
        output = StepOutput(
            np.frombuffer(sampled, np.int32).tolist(),
            _alternatives(values, ids) if ticket.plan.logprobs else None,
            experts=counted.read(ticket.number, len(ticket.plan.token_ids)) if counted is not None else (0, 0),
        )
        ticket.ring.busy = False
        self._collected += 1
        return output

    def read_logits(self, ticket: Ticket) -> npt.NDArray[np.float32]:
        """The step's float32 logits [rows, vocabulary], copied while all else waits: for tests and the start-up check.

        Raises EngineError when a later step was launched, which may have overwritten them.
        """
        if ticket.number != self._launched - 1:
            raise EngineError(f"the logits of step {ticket.number} are gone", "a later step was launched")
        self._backend.synchronize(self._stream)
        logits = np.zeros((ticket.rows, self._vocab_size), np.float32)
        if ticket.rows:
            source = ticket.step.activations[self._results.logits].address
            self._backend.copy_d2h(source, logits.data.cast("B"))
        return logits

    def close(self) -> None:
        """Wait for the device, then destroy the graphs and free the pinned memory; the backend stays open."""
        self._backend.synchronize(self._stream)
        for _, step in self._steps:
            step.destroy()
        self._rings.free()
        if self._experts is not None:
            self._experts.free()
            self._experts = None
        self._steps = []

    def _write_masks(self, plan: StepPlan, ring: Place) -> None:
        """Bring the masks of restricted slots to the device."""
        nbytes = ring.masks.shape[1] * _WORD
        for index, (slot, restriction) in enumerate(plan.masks):
            restriction.fill(ring.masks[index])
            source = ring.mask_bytes[index * nbytes : (index + 1) * nbytes]
            self._backend.copy_h2d_async(source, self._masks.address + slot * nbytes, self._stream)

    def _choose(self, plan: StepPlan) -> tuple[InputWriter, CapturedStep]:
        for writer, step in self._steps:
            if writer.fits(plan):
                return writer, step
        largest = self._steps[-1][0].bucket if self._steps else None
        raise EngineError(
            f"no captured step holds {len(plan.token_ids)} tokens of {len(plan.row_slot)} sequences",
            f"the longest query is {plan.max_query}, {len(plan.updates)} words change; the largest bucket is {largest}",
            "the buckets must cover the scheduler's limits",
        )


def _failed(what: str, bucket: Bucket, error: DeviceError) -> DeviceError:
    """The error with its step. Which kernel of a graph it was, a driver cannot say; run alone, each is named."""
    return DeviceError(
        f"{what}, in the graphs for up to {bucket.tokens} tokens of {bucket.sequences} sequences",
        f"{error.what}: {error.why}",
        "; ".join(filter(None, (error.cure, "atlas kernels test runs each kernel of this machine alone and names it"))),
        sticky=error.sticky,
    )


def _alternatives(values: memoryview, ids: memoryview) -> list[Alternatives]:
    """Rows of [1 + MAX_TOP_LOGPROBS] as lists that end where the ids do, or hold one -1 when nothing was wanted."""
    rows = np.frombuffer(ids, np.int32).reshape(-1, WIDE)
    floats = np.frombuffer(values, np.float32).reshape(-1, WIDE)
    result = []
    for row, numbers in zip(rows, floats, strict=True):
        length = max(1, int(np.count_nonzero(row >= 0)))
        result.append(Alternatives(row[:length].tolist(), numbers[:length].tolist()))
    return result
