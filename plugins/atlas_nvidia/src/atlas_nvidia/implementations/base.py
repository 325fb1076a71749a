"""What all implementations share: answers that most of them give alike, common refusals, and the packing of a launch."""

from collections.abc import Mapping, Sequence

import numpy as np

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OperandSpec, OpNeed, Packed
from atlas_core.ops.step import Count
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, i32, ptr
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.verdict import Verdict

VECTOR = 8
"""Elements of 16 bits in the 16 bytes that a thread moves at once."""
WARP = 32
SHARED_LIMITS = {"sm_90a": 227 * 1024}
"""Shared memory that a block may use, by architecture (CUDA programming guide, compute capabilities)."""
SHARED_ELSEWHERE = 99 * 1024
ELEMENTS = (DType.BF16, DType.F16)
"""Types of activations, matrices and pages that kernels exist for (element.cuh)."""
_VECTORS = {DType.BF16.value: 0, DType.F32.value: 1, DType.F16.value: 2}
"""VectorType of device.cuh, by storage layout."""
_LIVE = {"T": Count.TOKENS, "S": Count.SEQUENCES, "R": Count.ROWS}


class Implementation:
    """An OpImplementation; weights are read as stored, there is neither cache nor scratch unless a subclass has them.

    It has one kernel, ``entry`` of ``module``, or sets ``kernels`` itself. ``element`` is the type of its activations and matrices: names and modules are those of bf16 unless they end in it.
    """

    op: str
    name: str
    module: str = ""
    entry: str = ""
    rank: int = 10

    def __init__(self, element: DType = DType.BF16) -> None:
        self.element = element
        if element is not DType.BF16:
            self.name = f"{self.name}.{element.value}"
            self.module = f"{self.module}_{element.value}"
        self.kernels: Sequence[tuple[str, str]] = ((self.module, self.entry),)

    def refusals(self, need: OpNeed) -> list[str]:
        """Every reason why this need cannot be met."""
        raise NotImplementedError

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation."""
        reasons = self.refusals(need)
        return Verdict.no(*reasons) if reasons else Verdict.yes(self.rank)

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """See OpImplementation."""
        return {}

    def pack(
        self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview
    ) -> bytes | np.ndarray:
        """See OpImplementation. Raises KernelError: there is no packing but the stored one."""
        raise KernelError(
            f"{self.name} has no packing {packing}", "it reads weights as stored", "this is a fault of the caller"
        )

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return ()

    def scratch_bytes(self, need: OpNeed) -> int:
        """See OpImplementation."""
        return 0

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        raise NotImplementedError

    def launch(
        self, context: BindContext, geometry: Geometry, args: Sequence[Arg], cluster: tuple[int, int, int] | None = None
    ) -> Sequence[Launch]:
        """The kernel with these arguments. It may begin before its predecessor ends: all kernels here wait by themselves."""
        return self.launch_of(context, self.module, self.entry, geometry, args, cluster)

    @staticmethod
    def launch_of(
        context: BindContext, module: str, entry: str, geometry: Geometry, args: Sequence[Arg],
        cluster: tuple[int, int, int] | None = None,
    ) -> Sequence[Launch]:  # fmt: skip
        """As ``launch``, for an implementation of several kernels."""
        kernel = context.backend.kernel(module, entry)
        return (context.backend.prepare_launch(kernel, geometry, args, LaunchAttrs(overlap=True, cluster=cluster)),)


def not_fast(need: OpNeed, element: DType) -> list[str]:
    """Activations of 16 bits cannot keep the promise of exact numerics."""
    return [f"it computes in {element.value}, which is not exact"] if need.numerics != "fast" else []


def other_type(need: OpNeed, dtype: DType, *operands: str) -> list[str]:
    """Refusals of operands that are not of ``dtype``."""
    return [
        f"{name} is {need.operands[name].dtype.value}, not {dtype.value}"
        for name in operands
        if need.operands[name].dtype is not dtype
    ]


def not_stored(need: OpNeed, operand: str, *layouts: str) -> list[str]:
    """Refusals of a weight in another storage layout than these."""
    layout = need.operands[operand].layout
    found = layout.name if layout else "no weight"
    return [] if found in layouts else [f"{operand} is stored as {found}, not as {' or '.join(layouts)}"]


def no_vector(need: OpNeed, operand: str) -> list[str]:
    """Refusals of a vector of weights in a type that no kernel reads."""
    return not_stored(need, operand, *_VECTORS)


def ragged(need: OpNeed, *operands: str) -> list[str]:
    """Refusals of rows that are no whole number of 16-byte vectors."""
    return [
        f"rows of {name} have {need.operands[name].shape[-1]} elements, which is no multiple of {VECTOR}"
        for name in operands
        if need.operands[name].shape[-1] % VECTOR
    ]


def unbounded(need: OpNeed, operand: str) -> list[str]:
    """Refusals of rows whose live number no count tells."""
    return [] if need.operands[operand].live in _LIVE else [f"no live count bounds the rows of {operand}"]


def live_word(spec: OperandSpec) -> Arg:
    """Index of the live count that bounds the operand's rows."""
    return i32(_LIVE[spec.live])


def vector_type(need: OpNeed, operand: str) -> Arg:
    """The VectorType of a vector of weights that ``no_vector`` does not refuse."""
    layout = need.operands[operand].layout
    assert layout is not None
    return i32(_VECTORS[layout.name])


def addresses(context: BindContext, *operands: str) -> list[Arg]:
    """Pointers to operands, in order."""
    return [ptr(context.operands[name].address) for name in operands]


def spread(threads: int, block: int = 256) -> Geometry:
    """Enough blocks for so many threads; one block at least, so that every launch waits for its predecessor."""
    return Geometry((max(1, -(-threads // block)), 1, 1), (block, 1, 1))


def shared_limit(need: OpNeed) -> int:
    """Bytes of shared memory that a block may have."""
    return SHARED_LIMITS.get(need.arch, SHARED_ELSEWHERE)
