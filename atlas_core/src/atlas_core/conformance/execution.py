"""Runs one variant of a trial on one implementation: bound once, captured once, replayed with two sets of inputs."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from atlas_core.conformance.compare import changed, mismatch, same
from atlas_core.conformance.guarded import GuardedMemory
from atlas_core.conformance.variant import Variant, live_shape, padded
from atlas_core.contracts.backend import Event, GpuBackend, Graph, Stream
from atlas_core.contracts.ops import BindContext, Buffer, OpImplementation, OpNeed, Packed
from atlas_core.ops.arrays import by_layer, floating, laid_out, numpy_dtype
from atlas_core.ops.contract import Case, Operand, Tolerance
from atlas_core.ops.step import COUNT_WORDS, Count
from atlas_core.runtime.capture import captured
from atlas_core.runtime.loader import STORED, pack_weight

Array = np.ndarray[Any, Any]
_COUNTS, _SCRATCH = "the counts", "the scratch"
_POISON = {True: 0xFF, False: 0xA5}
"""Bytes of outputs before a run: NaN in every floating type, an implausible number in every integer type."""


class Execution:
    """One implementation bound to guarded buffers and captured while the trial's first case lay in them.

    Raises what the implementation raises. Use as a context manager: it gives memory and graph back.
    """

    def __init__(self, backend: GpuBackend, implementation: OpImplementation, variant: Variant, need: OpNeed) -> None:
        self._backend = backend
        self._implementation = implementation
        self._variant = variant
        self._need = need
        self._memory = GuardedMemory(backend)
        self._graph: Graph | None = None
        self._before: dict[str, Array] = {}
        self._weights = variant.weights()
        self.stream: Stream = backend.create_stream()
        self.launches = 0
        self._kept = 0

    def __enter__(self) -> Self:
        try:
            self._capture()
        except BaseException:
            self._memory.free()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._graph is not None:
            self._backend.destroy_graph(self._graph)
        self._memory.free()

    def verify(self) -> list[str]:
        """What is wrong, in sentences; empty when nothing is. Stops at the first phase with findings."""
        trial = self._variant.trial
        found = self._phase("as captured", trial.first)
        if found:
            return found
        bits = self._results(trial.first)
        found = self._phase("replay with other inputs and lengths", trial.second) or self._phase(
            "second run", trial.first
        )
        if not found:
            again = self._results(trial.first)
            found = [
                f"second run: {name} has other bits than the first run of the same inputs"
                for name in bits
                if not same(bits[name], again[name]).all()
            ]
        return found

    def load(self, case: Case) -> dict[str, Array]:
        """Put a case into the buffers; returns the arrays for the reference."""
        arrays = {**self._weights, **self._variant.arrays(case)}
        for operand in self._variant.op.operands:
            if operand.kind == "weight":
                continue  # written once: weights never change between replays
            data = self._physical(operand, arrays)
            self._memory.write(operand.name, self._laid_out(operand, data))
            self._before[operand.name] = data
        counts = np.zeros(COUNT_WORDS, np.int32)
        counts[[Count.TOKENS, Count.SEQUENCES, Count.ROWS, Count.UPDATES]] = (
            case.tokens, case.sequences, case.rows, case.updates,
        )  # fmt: skip
        self._memory.write(_COUNTS, counts)
        self._before[_COUNTS] = counts
        self._memory.write(_SCRATCH, np.full(self._need_scratch(), 0xFF, np.uint8))
        return arrays

    def replay(self, times: int = 1) -> None:
        """Launch the graph ``times`` times without waiting."""
        for _ in range(times):
            self._backend.launch_graph(self._graph, self.stream)

    def events(self) -> tuple[Event, Event]:
        """A pair of timing events."""
        return self._backend.create_event(timing=True), self._backend.create_event(timing=True)

    def _capture(self) -> None:
        first = self._variant.trial.first
        buffers = {name: self._memory.place(name, nbytes) for name, nbytes in self._sizes().items()}
        counts = self._memory.place(_COUNTS, 4 * COUNT_WORDS)
        scratch = self._memory.place(_SCRATCH, self._need_scratch())
        self._write_weights(first)
        self.load(first)
        workers = self._backend.facts().processors
        context = BindContext(self._backend, buffers, counts.address, scratch, workers, self._keep)
        launches = self._implementation.bind(self._need, context)
        self.launches = len(launches)
        self._graph = captured(self._backend, launches, self.stream)

    def _keep(self, data: bytes) -> int:
        self._kept += 1
        name = f"what it keeps ({self._kept})"
        address = self._memory.place(name, len(data)).address
        self._memory.write(name, data)
        return address

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for operand in self._variant.op.operands:
            spec = self._need.operands[operand.name]
            if operand.kind == "weight":
                sizes[operand.name] = self._packed(operand).nbytes
            elif operand.kind == "cache":
                sizes[operand.name] = self._variant.trial.first.arrays[operand.name].size * spec.dtype.itemsize
            else:
                sizes[operand.name] = int(np.prod(spec.shape)) * spec.dtype.itemsize
        return sizes

    def _packed(self, operand: Operand) -> Packed:
        asked = self._implementation.packings(self._need).get(operand.name)
        spec = self._need.operands[operand.name]
        layout = self._variant.codec_of(operand).layout
        return asked or Packed(f"{STORED}{layout.name}", layout.nbytes(spec.shape))

    def _write_weights(self, case: Case) -> None:
        for operand in self._variant.op.operands:
            if operand.kind == "weight":
                stored = self._variant.codec_of(operand).encode(case.arrays[operand.name])
                spec = self._need.operands[operand.name]
                data = pack_weight(self._implementation, self._packed(operand), spec, operand.name, stored)
                self._memory.write(operand.name, data)
                self._before[operand.name] = np.frombuffer(data, np.uint8)

    def _need_scratch(self) -> int:
        return self._implementation.scratch_bytes(self._need)

    def _physical(self, operand: Operand, arrays: Mapping[str, Array]) -> Array:
        """What lies in the buffer before a run."""
        spec = self._need.operands[operand.name]
        kind = numpy_dtype(spec.dtype)
        if operand.role == "out":
            poison = _POISON[floating(spec.dtype)]
            return np.full(int(np.prod(spec.shape)) * kind.itemsize, poison, np.uint8).view(kind).reshape(spec.shape)
        return padded(self._variant, operand, arrays[operand.name], spec.shape).astype(kind)

    def _laid_out(self, operand: Operand, array: Array) -> Array:
        """A cache's array as the layout under trial has it in memory; others as they are."""
        kv = self._variant.kv
        return laid_out(array, kv) if operand.kind == "cache" and kv else array

    def _logical(self, operand: Operand, array: Array) -> Array:
        """The inverse of ``_laid_out``."""
        kv = self._variant.kv
        return by_layer(array, kv) if operand.kind == "cache" and kv else array

    def _phase(self, phase: str, case: Case) -> list[str]:
        """Load a case, replay, and compare everything."""
        arrays = self.load(case)
        before = {name: array.copy() for name, array in arrays.items() if name not in self._weights}
        with np.errstate(over="ignore"):
            self._variant.op.reference(arrays, case.attrs)
        self.replay()
        self._backend.synchronize(self.stream)
        found = self._memory.damage()
        for operand in self._variant.op.operands:
            found += self._judge(operand, case, before, arrays)
        if changed(_COUNTS, self._memory.read(_COUNTS).view(np.int32), self._before[_COUNTS]):
            found.append("the live counts were changed")
        return [f"{phase}: {sentence}" for sentence in found]

    def _judge(self, operand: Operand, case: Case, before: Mapping[str, Array], want: Mapping[str, Array]) -> list[str]:
        raw = self._memory.read(operand.name)
        if operand.kind == "weight":
            sentence = changed(f"weight {operand.name}", raw, self._before[operand.name])
            return [sentence] if sentence else []
        old = self._before[operand.name]
        got = self._logical(operand, raw.view(old.dtype).reshape(old.shape))
        if operand.role == "in":
            sentence = changed(f"input {operand.name}", got, old)
        elif operand.role == "out":
            live = got[: live_shape(case, operand.name)[0]]
            sentence = mismatch(operand.name, _comparable(live), want[operand.name], self._tolerance(operand))
        else:
            meant = ~same(want[operand.name], before[operand.name])
            sentence = changed(operand.name, np.where(meant, old, got), old) or mismatch(
                operand.name,
                _comparable(np.where(meant, got, old)),
                np.where(meant, want[operand.name], _comparable(old)),
                self._tolerance(operand),
            )
        return [sentence] if sentence else []

    def _tolerance(self, operand: Operand) -> Tolerance:
        return self._variant.tolerance(operand, self._need.numerics)

    def _results(self, case: Case) -> dict[str, Array]:
        """The live part of everything that a run leaves behind."""
        results = {}
        for operand in self._variant.op.operands:
            if operand.role != "in":
                old = self._before[operand.name]
                got = self._logical(operand, self._memory.read(operand.name).view(old.dtype).reshape(old.shape))
                results[operand.name] = got if operand.role == "inout" else got[: live_shape(case, operand.name)[0]]
        return results

    def buffers(self) -> Mapping[str, Buffer]:
        """Sizes of every operand's buffer, for what a run must move at least."""
        return {name: Buffer(0, nbytes) for name, nbytes in self._sizes().items()}


def _comparable(array: Array) -> Array:
    """Integers as they are, everything in float as float32."""
    return array if array.dtype.kind in "iub" else array.astype(np.float32)
