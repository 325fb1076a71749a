"""Gemma 3 as a ModelWeightLoader."""

from collections.abc import Mapping
from typing import Any

from atlas_core.contracts.model import NameMap
from atlas_core.model.builder import ForwardBuilder
from atlas_core.model.program import Value
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.model import ModelSpec
from atlas_model_gemma import config, weights
from atlas_model_gemma.config import GemmaConfig


class Gemma3Loader:
    """Gemma 3, from 270M to 27B."""

    model_type = "gemma3"

    def read_config(self, given: Mapping[str, Any]) -> ModelSpec:
        """See ``config.read_config``."""
        return config.read_config(given, self.model_type)

    def name_map(self, naming: str, spec: ModelSpec) -> NameMap:
        """See ``weights.name_map``."""
        return weights.name_map(naming, spec)

    def record(self, spec: ModelSpec, step: ForwardBuilder) -> Value:
        """Layers with norms before and after both of their parts (Gemma Team, 2025); returns logits [R, vocabulary].

        Gemma multiplies embeddings by s = sqrt(hidden size), while the head uses the same table as it is. Here the whole stream is
        smaller by s instead: what is added to it comes out of norms whose weights are divided by s, and what reads it are norms,
        rms_norm(h, eps) = rms_norm(h / s, eps / s²). Nothing is computed for it while serving.
        """
        family = spec.family
        assert isinstance(family, GemmaConfig)
        h = step.embed(step.weight("embed", spec.vocab_size, spec.hidden_size))
        for index, kind in enumerate(family.kinds):
            layer = _Layer(step, spec, family, index)
            h = step.add(h, layer.attention(h, kind, family.kinds[:index].count(kind)))
            h = step.add(h, layer.mlp(h))
        eps = family.norm_eps / spec.hidden_size
        x = step.rms_norm(step.gather_rows(h), step.weight("final_norm", spec.hidden_size), eps)
        return step.logits(x, step.weight("head", spec.vocab_size, spec.hidden_size))


class _Layer:
    """One layer of a model being recorded."""

    def __init__(self, step: ForwardBuilder, spec: ModelSpec, family: GemmaConfig, index: int) -> None:
        self._step = step
        self._family = family
        self._hidden = spec.hidden_size
        self._stem = f"layers.{index}."

    def attention(self, h: Value, kind: str, place: int) -> Value:
        """Of one kind, over ``place`` of its cache; queries and keys are normalised before they turn."""
        step, family, dim = self._step, self._family, self._family.head_dim
        x = self._before(h, "attention_norm")
        q, k, v = (
            self._linear(x, part, count * dim)
            for part, count in (("q", family.heads), ("k", family.kv_heads), ("v", family.kv_heads))
        )
        q = step.head_rms_norm(q, self._weight("q_norm", dim), family.norm_eps)
        k = step.head_rms_norm(k, self._weight("k_norm", dim), family.norm_eps)
        rope = family.ropes[kind]
        inv_freq = step.constant(f"rope.{kind}", rope.inv_freq(rope.rotated(dim)))
        q = step.rope(q, inv_freq, family.heads, dim, rope.scale)
        k = step.rope(k, inv_freq, family.kv_heads, dim, rope.scale)
        y = step.attention(q, k, v, kind, place, family.heads, family.scale)
        return self._after(y, "o", "attended_norm")

    def mlp(self, h: Value) -> Value:
        """GeGLU (Shazeer, 2020)."""
        x, size = self._before(h, "mlp_norm"), self._family.intermediate_size
        y = self._step.gelu_mul(self._linear(x, "gate", size), self._linear(x, "up", size))
        return self._after(y, "down", "inner_norm")

    def _before(self, h: Value, part: str) -> Value:
        return self._step.rms_norm(h, self._weight(part, self._hidden), self._family.norm_eps / self._hidden)

    def _after(self, y: Value, product: str, norm: str) -> Value:
        """In float32 until it is normalised, as the stream that it is added to."""
        y = self._linear(y, product, self._hidden, DType.F32)
        return self._step.rms_norm(y, self._weight(norm, self._hidden), self._family.norm_eps)

    def _weight(self, part: str, *shape: int) -> Value:
        return self._step.weight(self._stem + part, *shape)

    def _linear(self, x: Value, part: str, rows: int, dtype: DType | None = None) -> Value:
        return self._step.linear(x, self._weight(part, rows, int(x.shape[1])), dtype)
