"""OpImplementation: one way to run one op on one machine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from msgspec import Struct, field

from atlas_core.contracts.backend import GpuBackend, Launch
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.verdict import Verdict


class OperandSpec(Struct, frozen=True):
    """One operand of a node: shape with every symbolic dimension at its largest for this bucket.

    ``layout`` is set for weights; ``dtype`` is the scalar type of everything else (and of plain weights).
    ``shape`` is outermost first; live extents (tokens, sequences, rows) may be smaller and are read from ``counts``.
    ``live`` names the count that bounds the first dimension: T tokens, S sequences, S+1 (their offsets), R rows of logits,
    U updates; empty when the whole shape is live. A cache's shape is that of one page of each layer; the pages are as many as
    its buffer holds: [layer, page, ...], every layer of ``nbytes / layers`` bytes.
    """

    shape: tuple[int, ...]
    dtype: DType
    layout: StorageLayout | None = None
    live: str = ""


class OpNeed(Struct, frozen=True):
    """What one node of the plan asks for. ``tokens``, ``sequences``, ``rows`` are the bucket's largest live counts.

    ``max_query`` is the longest query of a sequence in this bucket (1: pure decode). ``numerics`` is exact or fast.
    ``attrs`` are the node's constants; ``layer`` among them says where in a cache the node works, and is never a reason. ``kv`` names the cache layout already chosen for the node's group, if any.
    ``activation`` is the activation type, which values within a fused op have as well; None where nobody says.
    ``processors`` are the device's, or those that HARDWARE.toml declares before there is one; None where nobody says.
    """

    op: str
    operands: Mapping[str, OperandSpec]
    attrs: Mapping[str, Any]
    arch: str
    numerics: str
    tokens: int
    sequences: int
    rows: int
    max_query: int
    kv: str | None = None
    activation: DType | None = None
    processors: int | None = None


class Buffer(Struct, frozen=True):
    """Device memory of one operand."""

    address: int
    nbytes: int


def _keep_nothing(data: bytes) -> int:
    raise KernelError(
        f"{len(data)} bytes were to be kept",
        "nobody here gives them back",
        "this is a fault of whoever binds the launches",
    )


class BindContext(Struct, frozen=True):
    """What an implementation gets to make launches of.

    ``operands`` has a Buffer for each operand; ``counts`` is the address of the live counts (int32, see ops.step); ``scratch``
    is at least ``scratch_bytes`` long and shared by all nodes of the step. ``workers`` is the device's processor count.
    ``keep`` gives device memory that begins as these bytes and lives as long as the launches: tables of addresses, or what a kernel
    wants to find again at the next replay. No other node touches it.
    """

    backend: GpuBackend
    operands: Mapping[str, Buffer]
    counts: int
    scratch: Buffer
    workers: int
    keep: Callable[[bytes], int] = _keep_nothing


class Packed(Struct, frozen=True):
    """A weight as kernels want it: ``name`` identifies the packing; equal names mean equal bytes for equal weights."""

    name: str
    nbytes: int


class Repack(Struct, frozen=True):
    """How the device itself makes a packing out of stored rows, a piece of the matrix at a time.

    ``rows`` stored rows become ``nbytes`` packed ones; a piece has a multiple of so many rows, but for the last of a matrix. Leading
    dimensions count as rows. ``launch(backend, source, order, target, rows)`` packs ``rows`` rows at ``source``, an address that the
    device can read: row ``order[i]`` of them in the place i (int32 at the address ``order``; 0: as they lie). Bytes are those of
    ``OpImplementation.pack``.
    """

    rows: int
    nbytes: int
    launch: Callable[[GpuBackend, int, int, int, int], Launch]


@runtime_checkable
class Repacker(Protocol):
    """What an OpImplementation may offer besides, for backends whose device reads host memory (``unified_memory``)."""

    def repack(self, packing: str, layout: StorageLayout, shape: tuple[int, ...]) -> Repack | None:
        """None: this weight is packed by ``pack``."""
        ...


class KVLayout(Struct, frozen=True):
    """How one page of one layer lies in memory. ``order`` is ``page, kv, head, token, dim`` unless named otherwise.

    ``page_tokens`` positions a page; element (kv, head, token, dim) with kv 0 = keys, 1 = values. ``key_tile`` above 1: keys
    of so many consecutive tokens lie dimension by dimension, [token / key_tile, dim, token % key_tile]; it divides a page.
    A cache is [layer, page], or [page, layer] where ``layers_together``, so that few tokens take little of a large cache.
    """

    name: str
    dtype: DType
    page_tokens: int
    order: str = "kv, head, token, dim"
    key_tile: int = 1
    layers_together: bool = False

    def page_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one page of one layer."""
        return 2 * kv_heads * self.page_tokens * head_dim * self.dtype.itemsize


class OpImplementation(Protocol):
    """``op`` is the primitive or fused op that it runs; ``name`` is unique within its hardware.

    ``kernels`` are the (module, entry) pairs it may look up, for the audit before serving.
    """

    op: str
    name: str
    kernels: Sequence[tuple[str, str]]

    def supports(self, need: OpNeed) -> Verdict:
        """Whether this node can be run so, with a rank. Pure; collects every reason."""
        ...

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """For each weight operand, the packing this implementation reads. Operands not named are read as stored."""
        ...

    def pack(
        self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview
    ) -> bytes | np.ndarray:
        """The packed bytes of one weight, on the host; called once at load. Same answer for every implementation of a packing."""
        ...

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """Cache layouts that this implementation reads or writes, best first; empty for ops without a cache."""
        ...

    def scratch_bytes(self, need: OpNeed) -> int:
        """Scratch needed while the node runs; contents do not survive it, and it is not cleared before."""
        ...

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """The launches, in order, with every address fixed. Called once per bucket, at capture."""
        ...


class FusedCall(Struct, frozen=True):
    """One primitive inside a fused op: ``operands`` maps the primitive's operand names to names of the fused op's operands.

    Names that are neither inputs, weights nor outputs of the fused op are internal and never reach memory.
    ``attrs`` maps the primitive's attribute names to the fused op's.
    """

    op: str
    operands: Mapping[str, str]
    attrs: Mapping[str, str] = field(default_factory=dict)


class FusedOp(Struct, frozen=True):
    """An op defined by its decomposition, which is its reference: a straight sequence of recorded primitives.

    ``outputs`` are the operands that exist afterwards. Matching is exact: same primitives, same order, same data flow.

    With ``carried``, (an input, an output), it stands for a whole chain of such sequences, each of which gets as that input what the
    one before it left as that output: all the layers of a model. Link i has weights ``<weight>.<i>`` and the attribute ``layer.<i>``
    of its own (``ops.fused.unrolled``); everything else is the same for all. Such a chain may begin with calls that come ``before`` its
    first link, and end with others ``after`` its last: these come once, under names that the body does not use, but for what is carried.
    """

    name: str
    body: tuple[FusedCall, ...]
    outputs: tuple[str, ...]
    carried: tuple[str, str] | None = None
    before: tuple[FusedCall, ...] = ()
    after: tuple[FusedCall, ...] = ()
