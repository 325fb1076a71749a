"""The layers of the Qwen family, recorded."""

from atlas_core.model.builder import ForwardBuilder
from atlas_core.model.program import Value
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.model import ModelSpec
from atlas_model_qwen.config import ATTENTION, CONVOLUTION, DELTA, QwenConfig

_L2_EPS = 1e-6
"""A constant of the family: no configuration names it."""


class Layer:
    """One layer of a model being recorded; ``index`` names its weights."""

    def __init__(self, step: ForwardBuilder, spec: ModelSpec, index: int) -> None:
        assert isinstance(spec.family, QwenConfig)
        self._step = step
        self._family = spec.family
        self._hidden = spec.hidden_size
        self._stem = f"layers.{index}."

    def norm(self, x: Value, part: str) -> Value:
        """Root mean square norm of whole rows."""
        return self._step.rms_norm(x, self._weight(part, self._hidden), self._family.norm_eps)

    def attention(self, x: Value, place: int) -> Value:
        """Full attention over ``place`` of the cache, queries and keys normalised before they turn, the result gated."""
        step, family, dim = self._step, self._family, self._family.head_dim
        q = self._linear(x, "q", family.heads * dim)
        # Beside the other products of x, so that one kernel can make them all.
        gate = self._linear(x, "q_gate", family.heads * dim, bias=False) if family.gated else None
        k, v = self._linear(x, "k", family.kv_heads * dim), self._linear(x, "v", family.kv_heads * dim)
        if family.traits.qk_norm:
            q = step.head_rms_norm(q, self._weight("q_norm", dim), family.norm_eps)
            k = step.head_rms_norm(k, self._weight("k_norm", dim), family.norm_eps)
        inv_freq = step.constant("rope.inv_freq", family.rope.inv_freq(family.rotated))
        q = step.rope(q, inv_freq, family.heads, dim, family.rope.scale)
        k = step.rope(k, inv_freq, family.kv_heads, dim, family.rope.scale)
        y = step.attention(q, k, v, ATTENTION, place, family.heads, dim**-0.5)
        if gate is not None:
            y = step.sigmoid_mul(y, gate)
        return self._linear(y, "o", self._hidden, bias=family.o_bias)

    def linear_attention(self, x: Value, place: int) -> Value:
        """Gated DeltaNet (Yang et al., 2024) over ``place`` of both states: convolved, normalised, recurrent, gated."""
        step, linear = self._step, self._family.linear
        assert linear is not None
        heads, dims = (linear.key_heads, linear.value_heads), (linear.key_dim, linear.value_dim)
        qkv = self._linear(x, "linear.qkv", linear.channels, bias=False)
        z = self._linear(x, "linear.z", linear.value_features, bias=False)
        b = self._linear(x, "linear.b", linear.value_heads, bias=False)
        a = self._linear(x, "linear.a", linear.value_heads, bias=False)
        filters = self._weight("linear.convolution", linear.channels, linear.width)
        qkv = step.causal_conv1d(qkv, filters, CONVOLUTION, place)
        qkv = step.l2_norm(qkv, 2 * linear.key_heads, linear.key_dim, _L2_EPS)
        decay = self._weight("linear.a_log", linear.value_heads), self._weight("linear.dt_bias", linear.value_heads)
        y = step.gated_delta_rule(qkv, (a, b), decay, DELTA, place, heads, dims, linear.key_dim**-0.5)
        y = step.gated_rms_norm(y, z, self._weight("linear.norm", linear.value_dim), self._family.norm_eps)
        return self._linear(y, "linear.o", self._hidden, bias=False)

    def mlp(self, x: Value, stem: str = "", size: int | None = None) -> Value:
        """SwiGLU."""
        size = size or self._family.intermediate_size
        gate, up = self._linear(x, f"{stem}gate", size, bias=False), self._linear(x, f"{stem}up", size, bias=False)
        return self._linear(self._step.silu_mul(gate, up), f"{stem}down", self._hidden, bias=False)

    def mixture(self, x: Value) -> Value:
        """Routed experts, and beside them the shared one behind a gate of its own."""
        step, experts = self._step, self._family.experts
        assert experts is not None
        logits = self._linear(x, "router", experts.count, bias=False, dtype=DType.F32)
        routed = step.moe_route(logits, experts.active, normalise=experts.normalise)
        wide = experts.count, experts.size, self._hidden
        gate, up = self._weight("experts.gate", *wide), self._weight("experts.up", *wide)
        down = self._weight("experts.down", experts.count, self._hidden, experts.size)
        y = step.moe_experts(x, routed, gate, up, down)
        if not experts.shared:
            return y
        shared = self.mlp(x, "shared.", experts.shared)
        return step.add(y, step.sigmoid_mul(shared, self._linear(x, "shared.weight", 1, bias=False)))

    def _weight(self, part: str, *shape: int) -> Value:
        return self._step.weight(self._stem + part, *shape)

    def _linear(self, x: Value, part: str, rows: int, *, bias: bool | None = None, dtype: DType | None = None) -> Value:
        y = self._step.linear(x, self._weight(part, rows, int(x.shape[1])), dtype)
        wanted = self._family.qkv_bias if bias is None else bias
        return self._step.bias_add(y, self._weight(f"{part}.bias", rows)) if wanted else y
