"""The smallest complete machine: kernels are Python functions over host memory, every op runs its own reference.

It shows what a hardware plugin must bring, and gives engine tests a device that computes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct, field

from atlas_core.conformance.codecs import WeightCodec, plain_codecs
from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpNeed, Packed
from atlas_core.ops.arrays import floating, numpy_dtype
from atlas_core.ops.contract import Op, Operand
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.step import COUNT_WORDS, Count
from atlas_core.runtime.null import Injection, NullBackend, NullLaunch
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Arg, Geometry, i32, ptr
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.verdict import Verdict

Array = np.ndarray[Any, Any]
View = Callable[[int, int], memoryview]
Call = Callable[[View, Sequence[Arg]], None]
MODULE = "reference"


class HostKernels(Struct):
    """Kernels of HostBackend. A launch's last argument is the number of the bound call that it makes."""

    calls: list[Call] = field(default_factory=list)

    def bind(self, call: Call) -> int:
        """The number under which ``call`` can be launched."""
        self.calls.append(call)
        return len(self.calls) - 1


class HostBackend(NullBackend):
    """A NullBackend whose launches compute: see NullBackend for its knobs."""

    def __init__(self, kernels: HostKernels, **knobs: Any) -> None:
        super().__init__(injection=Injection(on_launch=self._compute), arch="host", **knobs)
        self._bound = kernels

    def kernel(self, module: str, entry: str) -> tuple[str, str]:
        """Every entry of the module of references; nothing else exists."""
        if module != MODULE:
            raise KernelError(f"there is no kernel {module}:{entry} for host", f"the only module is {MODULE}")
        return module, entry

    def _compute(self, launch: NullLaunch) -> None:
        self._bound.calls[int(launch.args[-1].value)](self.view, launch.args[:-1])


class ReferenceImplementation:
    """Runs an op by its reference on what lies in memory, reading live counts as every kernel must.

    Weights in any layout that has a codec; float32 pages of any size.
    """

    def __init__(self, op: Op, kernels: HostKernels, codecs: Iterable[WeightCodec] = (), rank: int = 0) -> None:
        self.op = op.name
        self.name = f"reference_{op.name}"
        self.kernels: Sequence[tuple[str, str]] = ((MODULE, op.name),)
        self._contract = op
        self._kernels = kernels
        self._rank = rank
        self._codecs: Mapping[str, WeightCodec] = {codec.layout.name: codec for codec in (*plain_codecs(), *codecs)}

    def supports(self, need: OpNeed) -> Verdict:
        """Whatever the reference can do."""
        unknown = [
            f"{name} is stored as {spec.layout.name}, which has no codec here"
            for name, spec in need.operands.items()
            if spec.layout and spec.layout.name not in self._codecs
        ]
        return Verdict.no(*unknown) if unknown else Verdict.yes(self._rank)

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """Everything is read as stored."""
        return {}

    def pack(self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview) -> bytes:
        """Never asked for, since nothing is packed."""
        raise NotImplementedError(f"{self.name} announced no packing, and {packing} is asked of it")

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """float32 pages of the size that the program was recorded with."""
        if "page_tokens" not in need.attrs:
            return ()
        return (KVLayout("host_f32", DType.F32, need.attrs["page_tokens"]),)

    def scratch_bytes(self, need: OpNeed) -> int:
        """None."""
        return 0

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """One launch."""
        sizes = {name: buffer.nbytes for name, buffer in context.operands.items()}
        number = self._kernels.bind(partial(self.run, need, sizes, {}))
        addresses = [ptr(context.operands[operand.name].address) for operand in self._contract.operands]
        kernel = context.backend.kernel(MODULE, self.op)
        return [context.backend.prepare_launch(kernel, Geometry(), [*addresses, ptr(context.counts), i32(number)])]

    def run(
        self, need: OpNeed, sizes: Mapping[str, int], weights: dict[str, Array], view: View, args: Sequence[Arg]
    ) -> None:
        """What the kernel does. ``weights`` keeps decoded weights from one launch to the next."""
        counts = np.frombuffer(view(int(args[-1].value), 4 * COUNT_WORDS), np.int32)
        places: dict[str, Array] = {}
        arrays: dict[str, Array] = {}
        for operand, arg in zip(self._contract.operands, args, strict=False):
            memory = view(int(arg.value), sizes[operand.name])
            if operand.kind == "weight":
                if operand.name not in weights:
                    weights[operand.name] = self._decode(need, operand, memory)
                arrays[operand.name] = weights[operand.name]
                continue
            places[operand.name] = self.live(need, operand, memory, counts)
            if operand.role != "out":
                value = places[operand.name]
                arrays[operand.name] = (
                    value.astype(np.float32) if floating(need.operands[operand.name].dtype) else value.copy()
                )
        self._contract.reference(arrays, need.attrs)
        for operand in self._contract.operands:
            if operand.role != "in":
                places[operand.name][...] = arrays[operand.name].astype(places[operand.name].dtype)

    def live(self, need: OpNeed, operand: Operand, memory: memoryview, counts: Array) -> Array:
        """The live part of an operand, as a view of its memory."""
        spec = need.operands[operand.name]
        array = np.frombuffer(memory, numpy_dtype(spec.dtype))
        if operand.kind == "cache":
            return array.reshape(spec.shape[0], -1, *spec.shape[1:])
        extents = {
            "": None, "T": counts[Count.TOKENS], "S": counts[Count.SEQUENCES], "S+1": counts[Count.SEQUENCES] + 1,
            "R": counts[Count.ROWS], "U": counts[Count.UPDATES],
        }  # fmt: skip
        return array[: prod(spec.shape)].reshape(spec.shape)[: extents[spec.live]]

    def _decode(self, need: OpNeed, operand: Operand, memory: memoryview) -> Array:
        spec = need.operands[operand.name]
        if spec.layout is None:
            raise ValueError(f"weight {operand.name} of {self.op} comes without a layout")
        return self._codecs[spec.layout.name].decode(bytes(memory), spec.shape)


def reference_implementations(
    kernels: HostKernels, ops: Mapping[str, Op] = PRIMITIVES, codecs: Iterable[WeightCodec] = ()
) -> list[ReferenceImplementation]:
    """One implementation of every op."""
    codecs = tuple(codecs)
    return [ReferenceImplementation(op, kernels, codecs) for op in ops.values()]
