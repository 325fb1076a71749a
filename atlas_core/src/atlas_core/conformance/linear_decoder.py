"""Small decoders of linear attention, recorded as the families record theirs: where fused ops of hybrids find their patterns."""

from msgspec import Struct

from atlas_core.conformance.decoder import ACTIVATION, BLOCKS, GROUP, SLOTS, Recorded
from atlas_core.model.builder import ForwardBuilder, StepLayout, record
from atlas_core.model.program import Value
from atlas_core.ops.step import SlotLayout
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.model import CacheSpec, ModelSpec

CONVOLUTION, DELTA = "convolution", "delta"
_VOCAB, _PAGE = 97, 16


class LinearShape(Struct, frozen=True):
    """Sizes of a decoder: key and value heads and their dimensions, and the width of the convolution."""

    label: str
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4
    layers: int = 2

    @property
    def channels(self) -> int:
        """Features of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


LINEAR_SHAPES = (
    LinearShape("delta16", 96, 8, 16, 16, 16),
    LinearShape("delta128", 128, 2, 4, 128, 128),
    LinearShape("delta128x3", 128, 1, 3, 128, 128),
)
LARGE_LINEAR_SHAPES = (LinearShape("35b", 2048, 16, 32, 128, 128, layers=1),)


class LinearDecoder:
    """Norm, linear attention, residual; logits of the wanted rows."""

    def __init__(self, shape: LinearShape) -> None:
        self._shape = shape

    def record(self, spec: ModelSpec, step: ForwardBuilder) -> Value:
        """See ModelWeightLoader."""
        hidden = self._shape.hidden
        h = step.embed(step.weight("embed", _VOCAB, hidden))
        for layer in range(self._shape.layers):
            h = step.add(h, linear_attention(step, self._shape, f"layers.{layer}.", h, layer))
        x = step.rms_norm(step.gather_rows(h), step.weight("final_norm", hidden), 1e-6)
        return step.linear(x, step.weight("head", _VOCAB, hidden), DType.F32)


def linear_attention(step: ForwardBuilder, shape: LinearShape, stem: str, h: Value, place: int) -> Value:
    """Of the stream ``h``: its norm, then linear attention over ``place`` of both states."""
    heads, dims = (shape.key_heads, shape.value_heads), (shape.key_dim, shape.value_dim)
    values = shape.value_heads * shape.value_dim
    x = step.rms_norm(h, step.weight(f"{stem}norm", shape.hidden), 1e-6)
    sizes = {"qkv": shape.channels, "z": values, "b": shape.value_heads, "a": shape.value_heads}
    qkv, z, b, a = (step.linear(x, step.weight(stem + part, rows, shape.hidden)) for part, rows in sizes.items())
    filters = step.weight(f"{stem}convolution", shape.channels, shape.width)
    qkv = step.causal_conv1d(qkv, filters, CONVOLUTION, place)
    qkv = step.l2_norm(qkv, 2 * shape.key_heads, shape.key_dim, 1e-6)
    decay = step.weight(f"{stem}a_log", shape.value_heads), step.weight(f"{stem}dt_bias", shape.value_heads)
    y = step.gated_delta_rule(qkv, (a, b), decay, DELTA, place, heads, dims, shape.key_dim**-0.5)
    y = step.gated_rms_norm(y, z, step.weight(f"{stem}head_norm", shape.value_dim), 1e-6)
    return step.linear(y, step.weight(f"{stem}o", shape.hidden, values))


def states_of(shape: LinearShape, layers: int) -> tuple[CacheSpec, CacheSpec]:
    """What so many such layers remember."""
    return (
        CacheSpec(CONVOLUTION, "recurrent", layers, state_shape=(shape.width - 1, shape.channels)),
        CacheSpec(DELTA, "recurrent", layers, state_shape=(shape.value_heads, shape.key_dim, shape.value_dim)),
    )


def record_linear_decoder(shape: LinearShape) -> Recorded:
    """Record a decoder of this shape with SLOTS slots. It has a group of pages too, which no layer uses."""
    caches = (CacheSpec(GROUP, "full", 0, 1, 16), *states_of(shape, shape.layers))
    spec = ModelSpec(
        "linear", shape.hidden, shape.layers, _VOCAB, BLOCKS * _PAGE, ACTIVATION, caches, (0,), None,
        tied_embeddings=False, family=shape,
    )  # fmt: skip
    layout = StepLayout(SlotLayout(SLOTS, (BLOCKS,), SLOTS), _PAGE, ACTIVATION, SLOTS)
    return Recorded(shape.label, record(LinearDecoder(shape), spec, layout), spec, layout)
