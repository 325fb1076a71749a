"""All layers of a decoder with mixtures of experts in one launch, for one token."""

from collections.abc import Sequence

from msgspec import Struct

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, KVLayout, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, f32, i32, ptr
from atlas_nvidia.implementations.attention import kv_layout
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    WARP,
    Implementation,
    addresses,
)
from atlas_plugin_hopper.chains import COPIES, SHARED, STATE_WORDS, WORD, chain_refusals, layer_table, links_of

BLOCKS, WARPS = 132, 12
"""Blocks of a launch, each on a processor of its own, and warps of a block (moe_decoder_layers.cu)."""
MAX_SPLITS = 33
"""The most parts of attention (resident_heads.cuh)."""
WEIGHTS = (
    "norm_weight", "q_weight", "k_weight", "v_weight", "q_norm", "k_norm", "output_weight", "inner_norm", "router_weight",
    "gate", "up", "down",
)  # fmt: skip
"""Of a link, in the order of the kernel's struct Layer."""


class Sizes(Struct, frozen=True):
    """Of a decoder that an instance of the kernel exists for; ``inner``: of an expert."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def words(self) -> int:
        """Words that blocks exchange: queries, keys, values and parts, then copies of what all of them read."""
        parts = MAX_SPLITS * self.q_heads * (2 + self.head_dim // 2)
        heads = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        read = self.hidden + self.q_heads * self.head_dim // 2 + self.experts + self.top_k * self.inner // 2
        return STATE_WORDS + heads + parts + COPIES * read


MODULES = {Sizes(2048, 768, 128, 8, 32, 4, 128): "moe_decoder_layers"}
"""Module by sizes: Qwen3-30B-A3B."""


class MoeDecoderLayers(Implementation):
    """One block a processor, all of them resident at once: they hand on what they compute through memory."""

    op = name = entry = "moe_decoder_layers"
    rank = 60

    def __init__(self, element: DType = DType.BF16) -> None:
        super().__init__(element)
        suffix = "" if element is DType.BF16 else f"_{element.value}"
        self.modules = {sizes: f"{module}{suffix}" for sizes, module in MODULES.items()}
        self.kernels = tuple((module, self.entry) for module in self.modules.values())

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        reasons = chain_refusals(need, self.element, _sizes(need), self.modules, WEIGHTS)
        if need.processors is not None and need.processors < BLOCKS:
            reasons.append(f"its {BLOCKS} blocks run at once, and this machine has {need.processors} processors")
        return reasons

    def kv_layouts(self, need: OpNeed) -> Sequence[KVLayout]:
        """See OpImplementation."""
        return (kv_layout(need, self.element),)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation. It keeps a table of addresses, and the words that blocks exchange.

        Raises KernelError for a machine with too few processors.
        """
        if context.workers < BLOCKS:
            raise KernelError(
                f"{self.name} has {BLOCKS} blocks that run at once, and this machine {context.workers} processors",
                why="they wait for one another",
                cure="this is a fault of whoever planned it for this machine",
            )
        attrs, sizes, links = need.attrs, _sizes(need), links_of(need)
        table = context.keep(layer_table(need, context, WEIGHTS))
        args = [
            ptr(context.counts), ptr(table),
            *addresses(context, "x", "y", "inv_freq", "row_slot", "slots"), ptr(context.keep(bytes(WORD * sizes.words))),
            i32(links), i32(attrs["page_tokens"]), i32(attrs["slot_stride"]), i32(attrs["table_offset"]),
            f32(attrs["eps"]), f32(attrs["head_eps"]), f32(attrs["scale"]), f32(attrs["rope_scale"]),
            i32(int(attrs["normalise"])), f32(attrs["route_scale"]),
        ]  # fmt: skip
        geometry = Geometry((BLOCKS, 1, 1), (WARPS * WARP, 1, 1), SHARED)
        kernel = context.backend.kernel(self.modules[sizes], self.entry)
        return (context.backend.prepare_launch(kernel, geometry, args, LaunchAttrs(cooperative=True)),)


def _sizes(need: OpNeed) -> Sizes:
    attrs, experts = need.attrs, need.operands["gate.0"].shape
    return Sizes(
        experts[2], experts[1], experts[0], attrs["top_k"], attrs["q_heads"], attrs["kv_heads"], attrs["head_dim"]
    )  # fmt: skip


def moe_chains() -> list[MoeDecoderLayers]:
    """All of them."""
    return [MoeDecoderLayers(element) for element in ELEMENTS]
