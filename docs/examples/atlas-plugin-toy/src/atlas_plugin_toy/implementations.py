"""The ops that this machine runs in its own way."""

from collections.abc import Mapping, Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpImplementation, OpNeed, Packed
from atlas_core.ops.step import Count
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Geometry, i32, ptr
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.verdict import Verdict

RANK = 20
"""The CPU's own implementations answer with at most 10."""
_LIVE = {"T": Count.TOKENS, "S": Count.SEQUENCES, "R": Count.ROWS}


class SiluMul:
    """``silu_mul`` (see atlas_core.ops.references) in float32: gate, up and y are [rows, columns]."""

    op = "silu_mul"
    name = "toy.silu_mul"
    kernels: Sequence[tuple[str, str]] = (("gate", "silu_mul"),)

    def supports(self, need: OpNeed) -> Verdict:
        """Float32 rows whose number is one of the step's live counts, in either numerics."""
        reasons = [
            f"it works in f32, and {name} is {operand.dtype.value}"
            for name, operand in need.operands.items()
            if operand.dtype is not DType.F32
        ]
        if need.operands["gate"].live not in _LIVE:
            reasons.append("no live count bounds the rows of gate")
        return Verdict.no(*reasons) if reasons else Verdict.yes(RANK, "one pass over each row")

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """None: the op has no weights."""
        return {}

    def pack(self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview) -> bytes:
        """Never called, since ``packings`` names nothing. Raises KernelError."""
        raise KernelError(f"{self.name} has no packing {packing}", "silu_mul has no weights", "report this as a bug")

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """None: the op has no cache."""
        return ()

    def scratch_bytes(self, need: OpNeed) -> int:
        """None."""
        return 0

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """One launch: a task for each processor, whatever number of rows a step will have."""
        gate = need.operands["gate"]
        kernel = context.backend.kernel("gate", "silu_mul")
        args = (
            ptr(context.counts),
            i32(_LIVE[gate.live]),
            *(ptr(context.operands[name].address) for name in ("gate", "up", "y")),
            i32(gate.shape[1]),
        )
        return (context.backend.prepare_launch(kernel, Geometry(grid=(context.workers, 1, 1)), args),)


def implementations() -> list[OpImplementation]:
    """Everything that ``atlas_gpu_backend`` promises."""
    return [SiluMul()]
