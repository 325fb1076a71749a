"""The Llama family as a ModelWeightLoader."""

from collections.abc import Mapping
from typing import Any

from atlas_core.contracts.model import NameMap
from atlas_core.model.builder import ForwardBuilder
from atlas_core.model.program import Value
from atlas_core.vocab.model import ModelSpec
from atlas_model_llama import config, weights
from atlas_model_llama.config import GROUP, LlamaConfig


class LlamaLoader:
    """Llama 2 and 3, SmolLM2."""

    model_type = "llama"

    def read_config(self, given: Mapping[str, Any]) -> ModelSpec:
        """See ``config.read_config``."""
        return config.read_config(given, self.model_type)

    def name_map(self, naming: str, spec: ModelSpec) -> NameMap:
        """See ``weights.name_map``."""
        return weights.name_map(naming, spec)

    def record(self, spec: ModelSpec, step: ForwardBuilder) -> Value:
        """Pre-norm decoder layers (Touvron et al., 2023); returns logits [R, vocabulary]."""
        family = spec.family
        assert isinstance(family, LlamaConfig)
        h = step.embed(step.weight("embed", spec.vocab_size, spec.hidden_size))
        for layer in range(spec.layers):
            h = step.add(h, _attention(step, spec, family, layer, h))
            h = step.add(h, _mlp(step, spec, family, layer, h))
        x = step.rms_norm(step.gather_rows(h), step.weight("final_norm", spec.hidden_size), family.norm_eps)
        return step.logits(x, step.weight("head", spec.vocab_size, spec.hidden_size))


class MistralLoader(LlamaLoader):
    """Mistral: the same layers; config.json may ask for a sliding window."""

    model_type = "mistral"


def _attention(step: ForwardBuilder, spec: ModelSpec, family: LlamaConfig, layer: int, h: Value) -> Value:
    dim, hidden, stem = family.head_dim, spec.hidden_size, f"layers.{layer}"
    x = step.rms_norm(h, step.weight(f"{stem}.attention_norm", hidden), family.norm_eps)
    q = _linear(step, x, f"{stem}.q", family.heads * dim, hidden, family.attention_bias)
    k = _linear(step, x, f"{stem}.k", family.kv_heads * dim, hidden, family.attention_bias)
    v = _linear(step, x, f"{stem}.v", family.kv_heads * dim, hidden, family.attention_bias)
    inv_freq = step.constant("rope.inv_freq", family.rope.inv_freq(family.rope.rotated(dim)))
    q = step.rope(q, inv_freq, family.heads, dim, family.rope.scale)
    k = step.rope(k, inv_freq, family.kv_heads, dim, family.rope.scale)
    y = step.attention(q, k, v, GROUP, layer, family.heads, dim**-0.5)
    return _linear(step, y, f"{stem}.o", hidden, family.heads * dim, family.attention_bias)


def _mlp(step: ForwardBuilder, spec: ModelSpec, family: LlamaConfig, layer: int, h: Value) -> Value:
    hidden, inner, stem = spec.hidden_size, family.intermediate_size, f"layers.{layer}"
    x = step.rms_norm(h, step.weight(f"{stem}.mlp_norm", hidden), family.norm_eps)
    gate = _linear(step, x, f"{stem}.gate", inner, hidden, family.mlp_bias)
    up = _linear(step, x, f"{stem}.up", inner, hidden, family.mlp_bias)
    return _linear(step, step.silu_mul(gate, up), f"{stem}.down", hidden, inner, family.mlp_bias)


def _linear(step: ForwardBuilder, x: Value, name: str, rows: int, columns: int, bias: bool) -> Value:
    y = step.linear(x, step.weight(name, rows, columns))
    return step.bias_add(y, step.weight(f"{name}.bias", rows)) if bias else y
