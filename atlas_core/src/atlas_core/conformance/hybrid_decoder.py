"""Small hybrids, recorded as the Qwen family records its own: where chains of whole layers find their patterns."""

from msgspec import Struct

from atlas_core.conformance.decoder import ACTIVATION, BLOCKS, GROUP, SLOTS, Mixture, Recorded, mixture
from atlas_core.conformance.linear_decoder import LinearShape, linear_attention, states_of
from atlas_core.model.builder import ForwardBuilder, StepLayout, record
from atlas_core.model.program import Value
from atlas_core.ops.step import SlotLayout
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.model import CacheSpec, ModelSpec

_VOCAB, _PAGE, _EPS = 97, 64, 1e-6


class HybridShape(Struct, frozen=True):
    """``kinds`` has a letter a layer, l for linear and f for full attention, which has heads (of queries, of keys, their size) and a gate."""

    label: str
    kinds: str
    linear: LinearShape
    heads: tuple[int, int, int]
    mixture: Mixture


HYBRID_SHAPES = (
    HybridShape(
        "35b-a3b", "llflf", LinearShape("", 2048, 16, 32, 128, 128), (16, 2, 256), Mixture(9, 8, 512, shared=True)
    ),
)  # fmt: skip
"""Sizes of a model whose layers are one launch somewhere, with fewer experts: such kernels are written for them."""


class HybridDecoder:
    """Norm, attention, residual, norm, experts, residual; logits of the wanted rows."""

    def __init__(self, shape: HybridShape) -> None:
        self._shape = shape

    def record(self, spec: ModelSpec, step: ForwardBuilder) -> Value:
        """See ModelWeightLoader."""
        shape, hidden = self._shape, self._shape.linear.hidden
        h = step.embed(step.weight("embed", _VOCAB, hidden))
        for layer, kind in enumerate(shape.kinds):
            stem, place = f"layers.{layer}.", shape.kinds[:layer].count(kind)
            linear = kind == "l"
            h = step.add(
                h,
                linear_attention(step, shape.linear, stem, h, place)
                if linear
                else self._attention(step, stem, h, place),
            )
            x = step.rms_norm(h, step.weight(f"{stem}mlp_norm", hidden), _EPS)
            h = step.add(h, mixture(step, stem, x, shape.mixture, shape.mixture.size))
        x = step.rms_norm(step.gather_rows(h), step.weight("final_norm", hidden), _EPS)
        return step.linear(x, step.weight("head", _VOCAB, hidden), DType.F32)

    def _attention(self, step: ForwardBuilder, stem: str, h: Value, place: int) -> Value:
        hidden, (q_heads, kv_heads, dim) = self._shape.linear.hidden, self._shape.heads
        x = step.rms_norm(h, step.weight(f"{stem}norm", hidden), _EPS)
        rows = {"q": q_heads * dim, "q_gate": q_heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        q, gate, k, v = (step.linear(x, step.weight(stem + part, count, hidden)) for part, count in rows.items())
        y = step.sigmoid_mul(step.attention(q, k, v, GROUP, place, q_heads, dim**-0.5), gate)
        return step.linear(y, step.weight(f"{stem}o", hidden, q_heads * dim))


def record_hybrid_decoder(shape: HybridShape) -> Recorded:
    """Record a hybrid of this shape with SLOTS slots."""
    layers, (_, kv_heads, dim) = len(shape.kinds), shape.heads
    caches = (
        CacheSpec(GROUP, "full", shape.kinds.count("f"), kv_heads, dim),
        *states_of(shape.linear, shape.kinds.count("l")),
    )
    spec = ModelSpec(
        "hybrid", shape.linear.hidden, layers, _VOCAB, BLOCKS * _PAGE, ACTIVATION, caches, (0,), None,
        tied_embeddings=False, family=shape,
    )  # fmt: skip
    layout = StepLayout(SlotLayout(SLOTS, (BLOCKS,), SLOTS), _PAGE, ACTIVATION, SLOTS)
    return Recorded(shape.label, record(HybridDecoder(shape), spec, layout), spec, layout)
