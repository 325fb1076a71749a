"""The ops that read and write pages of keys and values."""

from collections.abc import Sequence

from atlas_core.contracts.ops import BindContext, KVLayout, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, f32, i32, ptr
from atlas_core.vocab.verdict import Verdict
from atlas_plugin_cpu.base import RANK, CpuImplementation, addresses, ints

_MAX_HEAD_DIM = 256
_TILE = 16
_CACHE_INTS = ("kv_heads", "head_dim", "page_tokens", "slot_stride", "table_offset")


class _Cached(CpuImplementation):
    module = "attention"

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """float32, heads outermost; in pages of whole tiles of 16 tokens, one load brings a dimension of 16 keys.

        Pages of one number lie together: memory of the host is there once it is touched, in blocks of 2 MiB, and a layer by
        itself would take one for its first token.
        """
        tokens: int = need.attrs["page_tokens"]
        if tokens % _TILE:
            return (KVLayout("lhnd_f32", DType.F32, tokens, layers_together=True),)
        return (KVLayout("lhnd_f32_k16", DType.F32, tokens, key_tile=_TILE, layers_together=True),)

    def _cache_ints(self, need: OpNeed) -> tuple[Arg, ...]:
        """The cache's shape as kernels take it."""
        layers = need.operands["cache"].shape[0]
        return (*ints(need, *_CACHE_INTS), i32(self.kv_layouts(need)[0].key_tile), i32(layers))

    def _layer(self, need: OpNeed, context: BindContext) -> Arg:
        """Where the first page of the node's layer begins."""
        page = self.kv_layouts(need)[0].page_bytes(need.attrs["kv_heads"], need.attrs["head_dim"])
        return ptr(context.operands["cache"].address + need.attrs["layer"] * page)


class KvAppend(_Cached):
    """Copies each token's heads to their places."""

    op, x = "kv_append", "k"

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "k", "v", "positions", "token_row", "row_slot", "slots")
        return (*operands, self._layer(need, context), *self._cache_ints(need))


class PagedAttention(_Cached):
    """One walk over the keys for 24 pairs of a token and a query head, in blocks of 64 absolute positions."""

    op, x = "paged_attention", "q"

    def _refusals(self, need: OpNeed) -> list[str]:
        dim, heads, kv_heads = (need.attrs[name] for name in ("head_dim", "q_heads", "kv_heads"))
        reasons = []
        if dim % 8 or dim > _MAX_HEAD_DIM:
            reasons.append(f"takes heads of 8 to {_MAX_HEAD_DIM} dimensions in steps of 8, not {dim}")
        if heads % kv_heads:
            reasons.append(f"{heads} query heads do not share {kv_heads} key heads evenly")
        return reasons

    def _tasks(self, need: OpNeed, context: BindContext) -> int:
        """Items are dealt round, long ones and short ones to every task."""
        heads: int = need.attrs["q_heads"]
        return 1 if context.workers == 1 else max(1, min(need.tokens * heads, 2 * context.workers))

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "q", "cu_q", "row_slot", "slots")
        return (
            *operands, self._layer(need, context), *addresses(context, "y"),
            *ints(need, "q_heads"), *self._cache_ints(need), *ints(need, "window"), f32(need.attrs["scale"]),
        )  # fmt: skip


class FastPagedAttention(PagedAttention):
    """The same walk for 96 pairs, with factors rounded to bfloat16: their products are what tiles (AMX) add up.

    It serves as a part of ``fast.FastAttentionLinearAdd`` alone.
    """

    module = "attention_fast"

    def __init__(self) -> None:
        super().__init__()
        self.name = "cpu.fast_paged_attention"
        self.kernels = ((self.module, "fast_paged_attention"),)

    def supports(self, need: OpNeed) -> Verdict:
        """Yes for fast numerics."""
        verdict = super().supports(need)
        return Verdict.yes(RANK, "factors rounded to bf16, sums in float32") if verdict.ok else verdict

    def _refusals(self, need: OpNeed) -> list[str]:
        reasons = [] if need.numerics == "fast" else ["rounds factors to bf16, which exact numerics do not"]
        return reasons + super()._refusals(need)
