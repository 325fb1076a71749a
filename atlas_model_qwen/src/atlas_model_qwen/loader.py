"""The Qwen family as a ModelWeightLoader, one class for each model_type."""

from collections.abc import Mapping
from typing import Any

from atlas_core.contracts.model import NameMap
from atlas_core.model.builder import ForwardBuilder
from atlas_core.model.program import Value
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.model import ModelSpec
from atlas_model_qwen import config, weights
from atlas_model_qwen.config import QwenConfig
from atlas_model_qwen.layers import Layer


class Qwen2Loader:
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""

    model_type = "qwen2"

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
        for index in range(spec.layers):
            layer = Layer(step, spec, index)
            h = step.add(h, layer.attention(layer.norm(h, "attention_norm"), index))
            h = step.add(h, layer.mlp(layer.norm(h, "mlp_norm")))
        x = step.rms_norm(step.gather_rows(h), step.weight("final_norm", spec.hidden_size), family.norm_eps)
        return step.linear(x, step.weight("head", spec.vocab_size, spec.hidden_size), DType.F32)


class Qwen3Loader(Qwen2Loader):
    """Qwen3: queries and keys normalised head by head."""

    model_type = "qwen3"
