"""What all implementations of the CPU share: verdicts, packings, and launches of one kernel."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpNeed, Packed, Repack
from atlas_core.ops.step import Count
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, i32, ptr
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.verdict import Verdict
from atlas_plugin_cpu import packing as packings

NUMERICS = ("exact", "fast")
RANK = 10
_FLOATS = frozenset({DType.F32, DType.F16, DType.BF16, DType.F64, DType.F8E4M3, DType.F8E5M2})
_LIVE = {"T": Count.TOKENS, "S": Count.SEQUENCES, "R": Count.ROWS, "U": Count.UPDATES}


class CpuImplementation(ABC):
    """One op by one kernel, in float32. Subclasses say what more they refuse, and how to launch.

    ``x`` is the operand whose first dimension is spread over tasks, if any.
    """

    op: str
    module: str
    x: str = ""

    def __init__(self) -> None:
        self.name = f"cpu.{self.op}"
        self.kernels: Sequence[tuple[str, str]] = ((self.module, self.op),)

    def supports(self, need: OpNeed) -> Verdict:
        """Yes for float32 activations, unless ``_refusals`` finds a reason."""
        reasons = (
            [] if need.numerics in NUMERICS else [f"knows the numerics {' and '.join(NUMERICS)}, not {need.numerics}"]
        )
        for name, operand in need.operands.items():
            if operand.layout is None and operand.dtype in _FLOATS and operand.dtype != DType.F32:
                reasons.append(f"works in f32, and {name} is {operand.dtype.value}")
        if self.x and (need.operands[self.x].live not in _LIVE or len(need.operands[self.x].shape) > 2):
            reasons.append(f"takes {self.x} as rows whose number is one of the step's counts")
        reasons += self._refusals(need)
        if reasons:
            return Verdict.no(*reasons)
        if need.numerics == "exact":
            return Verdict.yes(RANK, "float32 arithmetic, bits independent of batch, chunks and threads")
        return Verdict.yes(RANK // 2, "the exact kernel also answers for fast numerics")

    def _refusals(self, need: OpNeed) -> list[str]:
        """Further reasons against this need."""
        return []

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """None: the op has no weights, or a subclass names them."""
        return {}

    def pack(
        self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview
    ) -> bytes | np.ndarray:
        """See ``packing.pack``."""
        return packings.pack(packing, layout, shape, data)

    def repack(self, packing: str, layout: StorageLayout, shape: tuple[int, ...]) -> Repack | None:
        """See ``packing.repack``."""
        return packings.repack(packing, layout, shape)

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """None: the op has no cache."""
        return ()

    def scratch_bytes(self, need: OpNeed) -> int:
        """None."""
        return 0

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """One launch of the kernel: counts first, then ``_arguments``."""
        module, entry = self._kernel(need)
        kernel = context.backend.kernel(module, entry)
        geometry = Geometry(grid=(self._tasks(need, context), 1, 1))
        return (
            context.backend.prepare_launch(kernel, geometry, (ptr(context.counts), *self._arguments(need, context))),
        )

    def _kernel(self, need: OpNeed) -> tuple[str, str]:
        """Module and entry for this need."""
        return self.kernels[0]

    def _tasks(self, need: OpNeed, context: BindContext) -> int:
        """Two for each worker, so that one that comes late takes less; never more than there are rows."""
        return max(1, min(need.operands[self.x].shape[0], 2 * context.workers)) if self.x else 1

    @abstractmethod
    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        """What the kernel takes after the counts."""

    def _live(self, need: OpNeed) -> Arg:
        """The index of the count that bounds the rows of ``x``."""
        return i32(_LIVE[need.operands[self.x].live])


def addresses(context: BindContext, *names: str) -> tuple[Arg, ...]:
    """The addresses of some operands."""
    return tuple(ptr(context.operands[name].address) for name in names)


def ints(need: OpNeed, *names: str) -> tuple[Arg, ...]:
    """Some attributes as 32-bit integers."""
    return tuple(i32(need.attrs[name]) for name in names)


def matrix_refusals(need: OpNeed, operand: str) -> list[str]:
    """Why a weight matrix cannot be read."""
    layout = need.operands[operand].layout
    if layout is None or layout.name not in packings.MATRIX_LAYOUTS:
        stored = "nothing known" if layout is None else layout.name
        return [f"reads {', '.join(packings.MATRIX_LAYOUTS)}, and {operand} is stored as {stored}"]
    return []


def vector_refusals(need: OpNeed, operand: str) -> list[str]:
    """Why a weight vector cannot be read."""
    layout = need.operands[operand].layout
    if layout is None or layout.name not in packings.VECTOR_LAYOUTS:
        stored = "nothing known" if layout is None else layout.name
        return [f"reads {', '.join(packings.VECTOR_LAYOUTS)}, and {operand} is stored as {stored}"]
    return []
