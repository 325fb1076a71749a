"""The Qwen family as a ModelWeightLoader, for each model_type."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from atlas_core.contracts.model import NameMap
from atlas_core.model.builder import ForwardBuilder
from atlas_core.model.program import Value
from atlas_core.vocab.model import ModelSpec
from atlas_model_qwen import config, weights
from atlas_model_qwen.config import FULL, QwenConfig
from atlas_model_qwen.layers import Layer


class QwenLoader:
    """What all types have in common; ``model_type`` is the one it was made for."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def read_config(self, given: Mapping[str, Any]) -> ModelSpec:
        """See ``config.read_config``."""
        return config.read_config(given, self.model_type)

    def name_map(self, naming: str, spec: ModelSpec) -> NameMap:
        """See ``weights.name_map``."""
        return weights.name_map(naming, spec)

    def record(self, spec: ModelSpec, step: ForwardBuilder) -> Value:
        """Pre-norm decoder layers; returns logits [R, vocabulary]."""
        family = spec.family
        assert isinstance(family, QwenConfig)
        h = step.embed(step.weight("embed", spec.vocab_size, spec.hidden_size))
        for index, kind in enumerate(family.kinds):
            layer, place = Layer(step, spec, index), family.kinds[:index].count(kind)
            x = layer.norm(h, "attention_norm")
            h = step.add(h, layer.attention(x, place) if kind == FULL else layer.linear_attention(x, place))
            x = layer.norm(h, "mlp_norm")
            sparse = family.experts is not None and index in family.experts.layers
            h = step.add(h, layer.mixture(x) if sparse else layer.mlp(x))
        x = step.rms_norm(step.gather_rows(h), step.weight("final_norm", spec.hidden_size), family.norm_eps)
        return step.logits(x, step.weight("head", spec.vocab_size, spec.hidden_size))


qwen2 = partial(QwenLoader, "qwen2")
qwen3 = partial(QwenLoader, "qwen3")
qwen3_moe = partial(QwenLoader, "qwen3_moe")
qwen3_next = partial(QwenLoader, "qwen3_next")
qwen3_5 = partial(QwenLoader, "qwen3_5")
qwen3_5_moe = partial(QwenLoader, "qwen3_5_moe")
qwen3_vl = partial(QwenLoader, "qwen3_vl")
qwen3_vl_moe = partial(QwenLoader, "qwen3_vl_moe")
