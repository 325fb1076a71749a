"""One trial as one implementation would meet it in a plan: bucket, types, storage layouts, cache layout."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from atlas_core.conformance.codecs import WeightCodec
from atlas_core.contracts.ops import KVLayout, OperandSpec, OpImplementation, OpNeed
from atlas_core.model.planner import Bucket
from atlas_core.ops.arrays import floating, rounded
from atlas_core.ops.contract import Case, Op, Operand, Tolerance
from atlas_core.ops.trials import Trial
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError

Array = np.ndarray[Any, Any]
LAST_PLACE = {DType.BF16: 2.0**-8, DType.F16: 2.0**-11}
"""Share of a number by which its last bit may be wrong, by activation type."""


class Variant(Struct, frozen=True):
    """A trial in one activation type, one layout of matrices (None: there are none) and one cache layout (None: no cache)."""

    op: Op
    trial: Trial
    activation: DType
    codec: WeightCodec | None
    kv: KVLayout | None = None

    @property
    def label(self) -> str:
        """The trial's label and the choices made here."""
        parts = [self.trial.label, self.activation.value]
        parts += [self.codec.layout.name] if self.codec else []
        parts += [f"kv={self.kv.name}"] if self.kv else []
        return ", ".join(parts)

    def bucket(self) -> Bucket:
        """Large enough for both cases, and by ``spare`` larger. A decode bucket has as many sequences as tokens, as engines capture it."""
        first, second, spare = self.trial.first, self.trial.second, self.trial.spare
        tokens = max(first.tokens, second.tokens) + spare
        sequences = max(first.sequences, second.sequences) + spare
        rows = max(first.rows, second.rows) + spare
        if first.max_query == 1:
            tokens = sequences = rows = max(tokens, sequences, rows)
        updates = max(first.updates, second.updates) + spare
        return Bucket(max(tokens, 1), max(sequences, 1), max(rows, 1), max(updates, 1), first.max_query)

    def need(self, arch: str, numerics: str, processors: int | None = None) -> OpNeed:
        """The need. Raises ValueError when a matrix has no whole number of its layout's blocks in a row."""
        bucket = self.bucket()
        operands = {operand.name: self._spec(operand, bucket) for operand in self.op.operands}
        need = OpNeed(
            self.op.name, operands, self.trial.first.attrs, arch, numerics,
            bucket.tokens, bucket.sequences, bucket.rows, bucket.max_query, activation=self.activation,
            processors=processors,
        )  # fmt: skip
        return replace(need, kv=self.kv.name) if self.kv else need

    def codec_of(self, operand: Operand) -> WeightCodec:
        """The codec of one weight operand."""
        if self.codec is None:
            raise KernelError(f"{self.op.name} has weights", "no storage layout was chosen")
        return self.codec if len(self.trial.first.shapes[operand.name]) > 1 else self.codec.vectors

    def dtype(self, operand: Operand) -> DType:
        """The scalar type of an operand that is not a weight."""
        if operand.kind == "cache" and self.kv:
            return self.kv.dtype
        return operand.dtype or self.trial.first.dtypes.get(operand.name) or self.activation

    def tolerance(self, operand: Operand, numerics: str = "exact") -> Tolerance:
        """How far this operand may be off: the op's word for the activation type or the operand's own, whichever is wider.

        Fast numerics in float32 may round activations on the way, and be off by the op's share of a row besides; in 16 bits they may round
        numbers that are stored with scales to that type, as ``--transcode`` does, and be off by a unit in its last place of a row.
        Raises KernelError when the op says nothing about either.
        """
        table = self.op.tolerances
        known = [table[dtype] for dtype in (self.activation, self.dtype(operand)) if dtype in table]
        if not known:
            raise KernelError(
                f"{self.op.name} has no tolerance for {self.dtype(operand).value}", "its contract does not name one",
                "declare the tolerance with the op",
            )  # fmt: skip
        of_row = self._of_row() if numerics == "fast" else 0.0
        return Tolerance(max(t.relative for t in known), max(t.absolute for t in known), of_row)

    def _of_row(self) -> float:
        if self.activation == DType.F32:
            return self.op.fast_of_row
        scaled = self.codec is not None and not self.codec.layout.scalar
        return LAST_PLACE[self.activation] if scaled else 0.0

    def weights(self) -> dict[str, Array]:
        """Weights as their layout can hold them, float32; both cases of a trial have the same."""
        result = {}
        for operand in self.op.operands:
            if operand.kind == "weight":
                codec, array = self.codec_of(operand), self.trial.first.arrays[operand.name]
                result[operand.name] = codec.decode(codec.encode(array), array.shape)
        return result

    def arrays(self, case: Case) -> dict[str, Array]:
        """A case's other arrays as the device can hold them, float32 in float: what the reference computes with. Copies."""
        return {
            operand.name: rounded(case.arrays[operand.name], self.dtype(operand)).copy()
            for operand in self.op.operands
            if operand.role != "out" and operand.kind != "weight"
        }

    def _spec(self, operand: Operand, bucket: Bucket) -> OperandSpec:
        dims = self.trial.first.shapes[operand.name]
        shape = tuple(extent(bucket, dim) for dim in dims)
        if operand.kind == "weight":
            layout = self.codec_of(operand).layout
            layout.nbytes(shape)
            return OperandSpec(shape, layout.scalar or DType.U8, layout)
        live = dims[0] if dims and isinstance(dims[0], str) else ""
        return OperandSpec(shape, self.dtype(operand), live=live)


def extent(bucket: Bucket, dim: int | str) -> int:
    """A dimension at its largest."""
    return dim if isinstance(dim, int) else _largest(bucket)[dim]


def _largest(bucket: Bucket) -> Mapping[str, int]:
    return {
        "T": bucket.tokens, "S": bucket.sequences, "S+1": bucket.sequences + 1, "R": bucket.rows, "U": bucket.updates,
    }  # fmt: skip


def live_shape(case: Case, operand: str) -> tuple[int, ...]:
    """An operand's live extents in a case."""
    counts = {"T": case.tokens, "S": case.sequences, "S+1": case.sequences + 1, "R": case.rows, "U": case.updates}
    return tuple(dim if isinstance(dim, int) else counts[dim] for dim in case.shapes[operand])


def variants(op: Op, trial: Trial, activations: Sequence[DType], codecs: Sequence[WeightCodec]) -> Iterator[Variant]:
    """Every combination that makes a difference to this op; cache layouts are the implementation's to offer."""
    typed = op.within or any(
        operand.kind == "cache"
        or (operand.kind == "activation" and operand.dtype is None and operand.name not in trial.first.dtypes)
        for operand in op.operands
    )
    for activation in activations if typed else (DType.F32,):
        for codec in _distinct(op, trial, codecs):
            yield Variant(op, trial, activation, codec)


def _distinct(op: Op, trial: Trial, codecs: Sequence[WeightCodec]) -> Sequence[WeightCodec | None]:
    """The codecs that differ to this op: none without weights, and those of vectors when it has no matrix."""
    weights = [operand.name for operand in op.operands if operand.kind == "weight"]
    if not weights:
        return (None,)
    if any(len(trial.first.shapes[name]) > 1 for name in weights):
        return codecs
    return tuple({codec.vectors.layout.name: codec.vectors for codec in codecs}.values())


def with_caches(variant: Variant, implementation: OpImplementation, arch: str, numerics: str) -> list[Variant]:
    """The variant once for each cache layout that the implementation offers; itself when the op has no cache."""
    if not any(operand.kind == "cache" for operand in variant.op.operands):
        return [variant]
    return [replace(variant, kv=kv) for kv in implementation.kv_layouts(variant.need(arch, numerics))]


def padded(variant: Variant, operand: Operand, array: Array, shape: tuple[int, ...]) -> Array:
    """The array in a buffer of the bucket's shape, in its physical type.

    Padding of floats is NaN. Padding of integers looks like the leftovers of an earlier step, so that a kernel that ignores
    the live counts does visible harm instead of crashing: token 0 of row 0 at position 0 in slot 0, rows that bring tokens, and
    updates that write 77.
    """
    dims = variant.trial.first.shapes[operand.name]
    if operand.kind == "cache" or not dims or isinstance(dims[0], int):
        return array
    full = np.empty(shape, array.dtype)
    live = array.shape[0]
    full[:live] = array
    if floating(variant.dtype(operand)):
        full[live:] = np.nan
    elif dims[0] == "S+1":
        full[live:] = variant.bucket().tokens
    else:
        full[live:] = 0
        if dims[0] == "U":
            full[live:, 1] = 77
    return full
