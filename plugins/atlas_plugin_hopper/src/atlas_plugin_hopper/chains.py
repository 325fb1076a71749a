"""All layers of a small dense decoder in one launch, for one token."""

import struct
from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import ResidencyError
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, f32, i32, ptr
from atlas_nvidia.implementations.attention import KEY_TILE, kv_layout, other_cache
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    WARP,
    Implementation,
    addresses,
    not_fast,
    not_stored,
    other_type,
)

SHARED = 226 * 1024
"""Bytes of dynamic shared memory of a block: ring, vectors, keys (decoder_layers.cu, decoder_clusters.cu)."""
COPIES, MAX_SPLITS, STATE_WORDS, WORD = 4, 32, 16, 8
"""Copies of what all blocks read, the most parts of attention, words before those that blocks exchange, bytes of one (decoder_layers.cu)."""
CLUSTER, CLUSTER_WARPS = 16, 13
"""Blocks of a cluster, and warps of a block (cluster_attention.cuh, cluster_product.cuh)."""
WEIGHTS = (
    "norm_weight", "q_weight", "k_weight", "v_weight", "output_weight", "inner_norm", "gate_weight", "up_weight",
    "down_weight",
)  # fmt: skip
"""Of a link, in the order of the kernel's struct Layer."""


class Sizes(Struct, frozen=True):
    """Of a decoder that an instance of the kernel exists for."""

    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def words(self) -> int:
        """Words that blocks exchange: queries, keys and values, then copies of what all of them read (decoder_layers.cu)."""
        parts = MAX_SPLITS * self.q_heads * (2 + self.head_dim // 2)
        heads = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        return STATE_WORDS + heads + COPIES * (self.hidden + self.inner // 2 + parts)

    def cluster_words(self, clusters: int) -> int:
        """Words that so many clusters exchange: sums of each, for two layers, in copies (decoder_clusters.cu)."""
        return STATE_WORDS + 2 * COPIES * clusters * self.hidden // 2


class Kernels(Struct, frozen=True):
    """Modules for the sizes of one decoder: of clusters, and where there is no room for ``clusters`` of them, of blocks."""

    by_clusters: str
    by_blocks: str
    clusters: int
    block_warps: int = 13


MODULES = {Sizes(576, 1536, 9, 3, 64): Kernels("decoder_clusters", "decoder_layers", 7)}
"""By sizes: SmolLM2-135M."""


class DecoderLayers(Implementation):
    """One block a processor, all of them resident at once: they hand on what they compute through each other's shared memory or through memory."""

    op = name = entry = "decoder_layers"
    rank = 60

    def __init__(self, element: DType = DType.BF16) -> None:
        super().__init__(element)
        suffix = "" if element is DType.BF16 else f"_{element.value}"
        self.modules = {
            sizes: replace(found, by_clusters=found.by_clusters + suffix, by_blocks=found.by_blocks + suffix)
            for sizes, found in MODULES.items()
        }
        self.kernels = tuple(
            (module, self.entry) for found in self.modules.values() for module in (found.by_clusters, found.by_blocks)
        )

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return chain_refusals(need, self.element, _sizes(need), self.modules, WEIGHTS)

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation. It keeps a table of addresses, and the words that blocks exchange."""
        attrs, sizes, links = need.attrs, _sizes(need), links_of(need)
        kernels = self.modules[sizes]
        table = context.keep(layer_table(need, context, WEIGHTS))
        words = max(sizes.words, sizes.cluster_words(kernels.clusters))
        args = [
            ptr(context.counts), ptr(table),
            *addresses(context, "x", "y", "inv_freq", "row_slot", "slots"), ptr(context.keep(bytes(WORD * words))),
            i32(links), i32(attrs["page_tokens"]), i32(attrs["slot_stride"]), i32(attrs["table_offset"]),
            f32(attrs["eps"]), f32(attrs["scale"]), f32(attrs["rope_scale"]),
        ]  # fmt: skip

        def launch(module: str, blocks: int, warps: int, attrs: LaunchAttrs) -> Sequence[Launch]:
            geometry = Geometry((blocks, 1, 1), (warps * WARP, 1, 1), SHARED)
            return (context.backend.prepare_launch(context.backend.kernel(module, self.entry), geometry, args, attrs),)

        try:
            attributes = LaunchAttrs(overlap=True, cluster=(CLUSTER, 1, 1), cooperative=True)
            return launch(kernels.by_clusters, CLUSTER * kernels.clusters, CLUSTER_WARPS, attributes)
        except ResidencyError:
            # Every block has rows of every matrix, or others could overtake it (resident_words.cuh).
            blocks = min(context.workers, sizes.hidden // 2)
            return launch(kernels.by_blocks, blocks, kernels.block_warps, LaunchAttrs(cooperative=True))


def chain_refusals(
    need: OpNeed, element: DType, sizes: object, modules: Collection[object], weights: Sequence[str]
) -> list[str]:
    """What keeps a chain of whole layers of these ``sizes`` from being one launch: there is one for each size in ``modules``."""
    reasons = [*not_fast(need, element), *other_type(need, DType.F32, "x", "y"), *other_cache(need, element)]
    if need.activation not in (None, element):
        reasons.append(f"it computes in {element.value}, not in {need.activation.value}")
    if sizes not in modules:
        reasons.append(f"there are kernels for {', '.join(map(str, modules))}, not {sizes}")
    if need.tokens != 1 or need.max_query != 1:
        reasons.append(f"it takes one token, not {need.tokens}")
    if need.attrs["window"] > 0:
        reasons.append(f"attention looks back at {need.attrs['window']} tokens only")
    if need.attrs["page_tokens"] % KEY_TILE:
        reasons.append(f"pages of {need.attrs['page_tokens']} tokens are no multiple of {KEY_TILE}")
    if 2 * need.operands["inv_freq"].shape[0] != need.attrs["head_dim"]:
        reasons.append("it rotates whole heads")
    if not reasons:
        named = (f"{name}.{link}" for link in range(links_of(need)) for name in weights)
        reasons += [reason for name in named for reason in not_stored(need, name, element.value)][:1]
    return reasons


def layer_table(need: OpNeed, context: BindContext, weights: Sequence[str]) -> bytes:
    """The kernel's struct Layer for each link: the addresses of its weights, then of its pages."""
    cache = context.operands["cache"]
    stride = cache.nbytes // need.operands["cache"].shape[0]
    table = [
        address
        for link in range(links_of(need))
        for address in (
            *(context.operands[f"{name}.{link}"].address for name in weights),
            cache.address + need.attrs[f"layer.{link}"] * stride,
        )
    ]
    return struct.pack(f"<{len(table)}Q", *table)


def links_of(need: OpNeed) -> int:
    """How many links the chain has."""
    return sum(name.startswith("layer.") for name in need.attrs)


def _sizes(need: OpNeed) -> Sizes:
    attrs, operands = need.attrs, need.operands
    return Sizes(
        operands["x"].shape[1],
        operands["gate_weight.0"].shape[0],
        attrs["q_heads"],
        attrs["kv_heads"],
        attrs["head_dim"],
    )


def chains() -> list[DecoderLayers]:
    """All of them."""
    return [DecoderLayers(element) for element in ELEMENTS]
