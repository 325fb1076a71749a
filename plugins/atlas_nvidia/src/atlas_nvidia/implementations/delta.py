"""The gated delta rule: token by token for few tokens and any heads, in chunks for prompts and heads of 128."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, f32, i32, ptr
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    Implementation,
    addresses,
    no_vector,
    not_fast,
    other_type,
    shared_limit,
    vector_type,
)
from atlas_nvidia.implementations.linear_attention import DIM, layer_of

_SIZES = ("key_heads", "value_heads", "key_dim", "value_dim")
CHUNK, SLICES = 64, 4
_TILES = 2 * CHUNK * CHUNK * 2
_DECAYS = 2 * CHUNK * 4
"""Bytes that delta_prepare leaves for each chunk and value head."""


class _DeltaRule(Implementation):
    op = "gated_delta_rule"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, self.element, "qkv", "a", "b", "y"),
            *no_vector(need, "a_log"), *no_vector(need, "dt_bias"),
        ]  # fmt: skip

    def gates(self, need: OpNeed, context: BindContext) -> list[Arg]:
        """The operands that both kernels begin with."""
        return [
            ptr(context.counts), *addresses(context, "qkv", "a", "b", "a_log", "dt_bias", "cu_q", "row_slot", "slots"),
        ]  # fmt: skip


class Recurrent(_DeltaRule):
    """A block has one head of one row, a thread one of its values."""

    name, module, entry = "gated_delta_rule", "delta_rule", "gated_delta_rule"

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. The rank depends on whether rows bring more than one token."""
        reasons = self.refusals(need)
        return Verdict.no(*reasons) if reasons else Verdict.yes(30 if need.max_query == 1 else 10)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = super().refusals(need)
        if need.attrs["value_dim"] > 256:
            reasons.append(f"it takes values of up to 256 dimensions, not {need.attrs['value_dim']}")
        if self._shared(need) > shared_limit(need):
            reasons.append(
                f"a state needs {self._shared(need)} bytes of shared memory, and {need.arch} has {shared_limit(need)}"
            )
        return reasons

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs = need.attrs
        args = [
            *self.gates(need, context), layer_of(need, context), *addresses(context, "y"), *(i32(attrs[s]) for s in _SIZES),
            i32(attrs["slot_stride"]), f32(attrs["scale"]), vector_type(need, "a_log"), vector_type(need, "dt_bias"),
        ]  # fmt: skip
        threads = -(-attrs["value_dim"] // 32) * 32
        geometry = Geometry((attrs["value_heads"], need.sequences, 1), (threads, 1, 1), self._shared(need))
        return self.launch(context, geometry, args)

    def _shared(self, need: OpNeed) -> int:
        size: int = 4 * need.attrs["key_dim"] * (need.attrs["value_dim"] + 2)
        return size


class Chunked(_DeltaRule):
    """Two launches: what the chunks of a prompt are by themselves, then the states along each row."""

    name, module, entry = "gated_delta_rule_chunks", "delta_states", "delta_states"
    rank = 20

    def __init__(self, element: DType = DType.BF16) -> None:
        super().__init__(element)
        prepare = "delta_prepare" if element is DType.BF16 else f"delta_prepare_{element.value}"
        self.kernels = ((prepare, "delta_prepare"), (self.module, "delta_states"))

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = super().refusals(need)
        if {need.attrs["key_dim"], need.attrs["value_dim"]} != {DIM}:
            dims = f"{need.attrs['key_dim']} and {need.attrs['value_dim']}"
            reasons.append(f"heads are of {dims}: it takes {DIM} only")
        return reasons

    def scratch_bytes(self, need: OpNeed) -> int:
        """See OpImplementation."""
        chunks: int = _chunks(need) * need.attrs["value_heads"]
        return chunks * (_TILES + _DECAYS)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        attrs, chunks, heads = need.attrs, _chunks(need), need.attrs["value_heads"]
        tiles = context.scratch.address
        between = [ptr(tiles), ptr(tiles + chunks * heads * _TILES)]
        sizes = [i32(attrs["key_heads"]), i32(heads), i32(attrs["slot_stride"])]
        scale = f32(attrs["scale"])
        types = [vector_type(need, "a_log"), vector_type(need, "dt_bias")]
        prepare = [*self.gates(need, context), *between, *sizes, i32(need.sequences), scale, *types]
        states = [
            ptr(context.counts), *addresses(context, "qkv"), *between, *addresses(context, "cu_q", "row_slot", "slots"),
            layer_of(need, context), *addresses(context, "y"), *sizes, scale,
        ]  # fmt: skip
        one = Geometry((chunks, attrs["key_heads"], 1), (128, 1, 1), _PREPARE_BYTES)
        other = Geometry((SLICES, heads, need.sequences), (256, 1, 1), _states_bytes(need))
        backend, attributes = context.backend, LaunchAttrs(overlap=True)
        return tuple(
            backend.prepare_launch(backend.kernel(*kernel), geometry, args, attributes)
            for kernel, geometry, args in zip(self.kernels, (one, other), (prepare, states), strict=True)
        )


def _chunks(need: OpNeed) -> int:
    """So many cover every division of the tokens: a row may begin and end within a chunk."""
    return need.tokens // CHUNK + 2 * need.sequences


_KEYS = CHUNK * DIM * 2
_PREPARE_BYTES = 2 * _KEYS + 4 * (CHUNK * (CHUNK + 4) + 2 * CHUNK)


def _states_bytes(need: OpNeed) -> int:
    """Stages of keys, queries, tiles, values and decays, and what warps give one another: as in delta_states.cu."""
    stage = 2 * _KEYS + _TILES + CHUNK * (DIM // SLICES) * 2 + _DECAYS
    stages = 2 if need.arch == "sm_90a" else 1
    return stages * stage + 2 * 20 * 32 * 16


ALL: tuple[OpImplementation, ...] = tuple(make(element) for element in ELEMENTS for make in (Recurrent, Chunked))
