"""MiniMax M2 as a ModelWeightLoader."""

from collections.abc import Mapping
from typing import Any

from atlas_core.contracts.model import NameMap
from atlas_core.model.builder import ForwardBuilder
from atlas_core.model.program import Value
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.model import ModelSpec
from atlas_model_minimax import config, weights
from atlas_model_minimax.config import GROUP, MiniMaxConfig


class MiniMaxLoader:
    """MiniMax-M2, M2.1, M2.5 and M2.7."""

    model_type = "minimax_m2"

    def read_config(self, given: Mapping[str, Any]) -> ModelSpec:
        """See ``config.read_config``."""
        return config.read_config(given, self.model_type)

    def name_map(self, naming: str, spec: ModelSpec) -> NameMap:
        """See ``weights.name_map``."""
        return weights.name_map(naming, spec)

    def record(self, spec: ModelSpec, step: ForwardBuilder) -> Value:
        """Pre-norm layers of attention and experts; returns logits [R, vocabulary]."""
        family = spec.family
        assert isinstance(family, MiniMaxConfig)
        h = step.embed(step.weight("embed", spec.vocab_size, spec.hidden_size))
        for layer in range(spec.layers):
            h = step.add(h, _attention(step, spec, family, layer, h))
            h = step.add(h, _mixture(step, spec, family, layer, h))
        x = step.rms_norm(step.gather_rows(h), step.weight("final_norm", spec.hidden_size), family.norm_eps)
        return step.logits(x, step.weight("head", spec.vocab_size, spec.hidden_size))


def _attention(step: ForwardBuilder, spec: ModelSpec, family: MiniMaxConfig, layer: int, h: Value) -> Value:
    """Queries and keys are normalised over all their heads at once (``per_layer``), before the first part of each head turns."""
    dim, hidden, stem = family.head_dim, spec.hidden_size, f"layers.{layer}"
    wide, narrow = family.heads * dim, family.kv_heads * dim
    x = step.rms_norm(h, step.weight(f"{stem}.attention_norm", hidden), family.norm_eps)
    # In float32 until they are normalised: a norm over thousands of features wants them unrounded, as the residual stream is.
    q = step.linear(x, step.weight(f"{stem}.q", wide, hidden), DType.F32)
    k = step.linear(x, step.weight(f"{stem}.k", narrow, hidden), DType.F32)
    v = step.linear(x, step.weight(f"{stem}.v", narrow, hidden))
    q = step.rms_norm(q, step.weight(f"{stem}.q_norm", wide), family.norm_eps)
    k = step.rms_norm(k, step.weight(f"{stem}.k_norm", narrow), family.norm_eps)
    inv_freq = step.constant("rope.inv_freq", family.rope.inv_freq(family.rope.rotated(dim)))
    q = step.rope(q, inv_freq, family.heads, dim, family.rope.scale)
    k = step.rope(k, inv_freq, family.kv_heads, dim, family.rope.scale)
    y = step.attention(q, k, v, GROUP, layer, family.heads, dim**-0.5)
    return step.linear(y, step.weight(f"{stem}.o", hidden, wide))


def _mixture(step: ForwardBuilder, spec: ModelSpec, family: MiniMaxConfig, layer: int, h: Value) -> Value:
    """The best of all experts by sigmoid and bias, weighted by their sigmoids, which are made to sum up to one."""
    hidden, count, size, stem = spec.hidden_size, family.experts, family.expert_size, f"layers.{layer}"
    x = step.rms_norm(h, step.weight(f"{stem}.mlp_norm", hidden), family.norm_eps)
    logits = step.linear(x, step.weight(f"{stem}.router", count, hidden), DType.F32)
    bias = step.weight(f"{stem}.router.bias", count)
    routed = step.moe_route_sigmoid(logits, bias, family.active, groups=1, top_groups=1, normalise=True, scale=1.0)
    gate = step.weight(f"{stem}.experts.gate", count, size, hidden)
    up = step.weight(f"{stem}.experts.up", count, size, hidden)
    return step.moe_experts(x, routed, gate, up, step.weight(f"{stem}.experts.down", count, hidden, size))
