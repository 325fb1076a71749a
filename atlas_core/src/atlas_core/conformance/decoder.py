"""Small decoders, recorded as the families record theirs: where fused ops find their patterns."""

import numpy as np
from msgspec import Struct

from atlas_core.model.builder import ForwardBuilder, StepLayout, record
from atlas_core.model.program import Program, Value
from atlas_core.ops.step import SlotLayout
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.model import CacheSpec, ModelSpec

GROUP = "full"
SLOTS = 8
BLOCKS = 24
ACTIVATION = DType.BF16
"""Stands for "the activation type" in a recorded program: no op has an operand that is bfloat16 by contract."""


class Mixture(Struct, frozen=True):
    """Experts in place of a dense network: ``count`` of ``size``, ``active`` a token; ``shared`` adds one for all."""

    count: int
    active: int
    size: int
    shared: bool = False


class DecoderShape(Struct, frozen=True):
    """Sizes of a decoder. ``bias`` adds biases to q, k and v, ``head_norm`` norms of the heads of q and k."""

    label: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    page_tokens: int
    layers: int = 2
    bias: bool = False
    head_norm: bool = False
    mixture: Mixture | None = None


SHAPES = (
    DecoderShape("tiny", 64, 4, 2, 16, 96, 97, 16),
    DecoderShape("nine", 576, 9, 3, 64, 1536, 512, 16),
    DecoderShape("wide", 512, 4, 1, 128, 768, 512, 64),
    DecoderShape("eight", 1024, 8, 2, 128, 1792, 1024, 16),
    DecoderShape("bias", 256, 4, 2, 64, 384, 256, 32, bias=True),
    DecoderShape("heads", 192, 6, 2, 64, 256, 256, 16, layers=1, head_norm=True),
    DecoderShape("mixture", 256, 2, 1, 128, 0, 256, 16, layers=1, head_norm=True, mixture=Mixture(24, 4, 96)),
    DecoderShape("shared", 128, 4, 2, 32, 64, 256, 16, layers=1, mixture=Mixture(12, 3, 64, shared=True)),
)
CHAIN_SHAPES = (
    DecoderShape(
        "thirty", 2048, 32, 4, 128, 0, 256, 64, head_norm=True, mixture=Mixture(128, 8, 768)
    ),
)  # fmt: skip
"""Besides, for chains of layers: kernels of these exist for the sizes of few models."""
LARGE_SHAPES = (
    DecoderShape("8b", 4096, 32, 8, 128, 14336, 128256, 64, layers=1),
    DecoderShape(
        "30b-a3b", 2048, 32, 4, 128, 0, 4096, 64, layers=1, head_norm=True, mixture=Mixture(128, 8, 768)
    ),
)  # fmt: skip


def dense(step: ForwardBuilder, stem: str, x: Value, inner: int) -> Value:
    """SwiGLU of ``inner`` features."""
    hidden = int(x.shape[1])
    gate = step.linear(x, step.weight(f"{stem}gate", inner, hidden))
    up = step.linear(x, step.weight(f"{stem}up", inner, hidden))
    return step.linear(step.silu_mul(gate, up), step.weight(f"{stem}down", hidden, inner))


def mixture(step: ForwardBuilder, stem: str, x: Value, experts: Mixture, inner: int) -> Value:
    """Routed experts; if there is one for all, it has ``inner`` features and a gate of its own."""
    hidden, wide = int(x.shape[1]), (experts.count, experts.size, int(x.shape[1]))
    logits = step.linear(x, step.weight(f"{stem}router", experts.count, hidden), DType.F32)
    routed = step.moe_route(logits, experts.active, normalise=True)
    gate, up = step.weight(f"{stem}experts.gate", *wide), step.weight(f"{stem}experts.up", *wide)
    y = step.moe_experts(x, routed, gate, up, step.weight(f"{stem}experts.down", experts.count, hidden, experts.size))
    if not experts.shared:
        return y
    shared = dense(step, stem, x, inner)
    return step.add(y, step.sigmoid_mul(shared, step.linear(x, step.weight(f"{stem}shared", 1, hidden))))


class DenseDecoder:
    """A Llama-like decoder: norm, attention, residual, norm, gated MLP or experts, residual; logits of the wanted rows."""

    def __init__(self, shape: DecoderShape) -> None:
        self._shape = shape

    def record(self, spec: ModelSpec, step: ForwardBuilder) -> Value:
        """See ModelWeightLoader."""
        shape = self._shape
        h = step.embed(step.weight("embed", shape.vocab, shape.hidden))
        for layer in range(shape.layers):
            h = step.add(h, self._attention(step, layer, h))
            h = step.add(h, self._mlp(step, layer, h))
        x = step.rms_norm(step.gather_rows(h), step.weight("final_norm", shape.hidden), 1e-5)
        return step.linear(x, step.weight("head", shape.vocab, shape.hidden), DType.F32)

    def _attention(self, step: ForwardBuilder, layer: int, h: Value) -> Value:
        shape, dim = self._shape, self._shape.head_dim
        x = step.rms_norm(h, step.weight(f"layers.{layer}.attention_norm", shape.hidden), 1e-5)
        q = self._linear(step, x, f"layers.{layer}.q", shape.heads * dim, shape.hidden, shape.bias)
        k = self._linear(step, x, f"layers.{layer}.k", shape.kv_heads * dim, shape.hidden, shape.bias)
        v = self._linear(step, x, f"layers.{layer}.v", shape.kv_heads * dim, shape.hidden, shape.bias)
        if shape.head_norm:
            q = step.head_rms_norm(q, step.weight(f"layers.{layer}.q_norm", dim), 1e-6)
            k = step.head_rms_norm(k, step.weight(f"layers.{layer}.k_norm", dim), 1e-6)
        inv_freq = step.constant("rope.inv_freq", 10000.0 ** (-np.arange(dim // 2) / (dim // 2)))
        q = step.rope(q, inv_freq, shape.heads, dim)
        k = step.rope(k, inv_freq, shape.kv_heads, dim)
        y = step.attention(q, k, v, GROUP, layer, shape.heads, dim**-0.5)
        return self._linear(step, y, f"layers.{layer}.o", shape.hidden, shape.heads * dim)

    def _mlp(self, step: ForwardBuilder, layer: int, h: Value) -> Value:
        shape = self._shape
        x = step.rms_norm(h, step.weight(f"layers.{layer}.mlp_norm", shape.hidden), 1e-5)
        stem = f"layers.{layer}."
        return (
            mixture(step, stem, x, shape.mixture, shape.inner) if shape.mixture else dense(step, stem, x, shape.inner)
        )

    @staticmethod
    def _linear(step: ForwardBuilder, x: Value, name: str, rows: int, columns: int, bias: bool = False) -> Value:
        y = step.linear(x, step.weight(name, rows, columns))
        return step.bias_add(y, step.weight(f"{name}.bias", rows)) if bias else y


class Recorded(Struct, frozen=True):
    """A program with what is needed to make up inputs for it; ``spec`` has one group of pages, and perhaps states."""

    label: str
    program: Program
    spec: ModelSpec
    layout: StepLayout


def record_decoder(shape: DecoderShape) -> Recorded:
    """Record a decoder of this shape with room for BLOCKS pages a sequence in SLOTS slots."""
    cache = CacheSpec(GROUP, "full", shape.layers, shape.kv_heads, shape.head_dim)
    spec = ModelSpec(
        "dense", shape.hidden, shape.layers, shape.vocab, BLOCKS * shape.page_tokens, ACTIVATION, (cache,), (0,), None,
        tied_embeddings=False, family=shape,
    )  # fmt: skip
    layout = StepLayout(SlotLayout(SLOTS, (BLOCKS,), SLOTS), shape.page_tokens, ACTIVATION, SLOTS)
    return Recorded(shape.label, record(DenseDecoder(shape), spec, layout), spec, layout)
