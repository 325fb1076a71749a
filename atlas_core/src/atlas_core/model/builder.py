"""The words in which a model plugin writes its forward pass, and the sampling tail that core adds."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from atlas_core.model.program import Dim, Program, Recorder, Value
from atlas_core.ops.contract import Op
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.step import SlotLayout
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import PluginError
from atlas_core.vocab.model import CacheSpec, ModelSpec
from atlas_core.vocab.sampling import MAX_TOP_LOGPROBS

RESIDUAL = DType.F32
"""Type of the residual stream."""


class StepLayout(Struct, frozen=True):
    """What a record depends on besides the model: slots, page size, activation type, rows of the penalty pool, snapshots of states.

    The residual stream is float32 whatever the activation type is: dozens of sums into one value would lose it otherwise.
    """

    slots: SlotLayout
    page_tokens: int
    activation: DType
    penalty_rows: int
    snapshots: int = 0

    @property
    def places(self) -> int:
        """Places of recurrent states: one a slot, and those of snapshots."""
        return self.slots.slots + self.snapshots


class ForwardBuilder:
    """Records primitives; every method appends one or two nodes and returns the value they create.

    ``tokens`` and ``positions`` are int32 [T]. Shapes are [T, features] unless said otherwise.
    """

    def __init__(self, spec: ModelSpec, layout: StepLayout, ops: Mapping[str, Op] = PRIMITIVES) -> None:
        self._recorder = Recorder()
        self._ops = ops
        self._spec = spec
        self._layout = layout
        value = self._recorder.value
        self._cu_q = value("cu_q", "input", ("S+1",), DType.I32)
        self._row_slot = value("row_slot", "input", ("S",), DType.I32)
        self._slots = value("slots", "state", (layout.slots.words,), DType.I32)
        self._penalty = value("penalty", "state", (layout.penalty_rows, spec.vocab_size), DType.I32)
        self.tokens = value("tokens", "activation", ("T",), DType.I32)
        self.positions = value("positions", "activation", ("T",), DType.I32)
        self._token_row = value("token_row", "activation", ("T",), DType.I32)
        self.op(
            "step_begin",
            {
                "updates": value("updates", "input", ("U", 2), DType.I32),
                "token_ids": value("token_ids", "input", ("T",), DType.I32),
                "cu_q": self._cu_q,
                "row_slot": self._row_slot,
                "slots": self._slots,
                "penalty": self._penalty,
                "tokens": self.tokens,
                "positions": self.positions,
                "token_row": self._token_row,
            },
            {"slot_stride": layout.slots.stride},
        )

    def op(self, name: str, operands: Mapping[str, Value], attrs: Mapping[str, Any]) -> None:
        """Record any op, a plugin's own included. Raises ValueError when it does not fit the op's declaration."""
        self._recorder.node(self._ops[name], operands, attrs)

    def weight(self, name: str, *shape: int) -> Value:
        """The weight with this canonical name; the store checks that the checkpoint has this shape."""
        return self._recorder.value(name, "weight", shape)

    def constant(self, name: str, array: np.ndarray) -> Value:
        """A float32 array computed from the configuration."""
        return self._recorder.constant(name, array)

    def activation(self, stem: str, *shape: Dim, dtype: DType | None = None) -> Value:
        """A new value in the arena, of the step's activation type unless told otherwise."""
        return self._recorder.fresh(stem, shape, dtype or self._layout.activation)

    def _unary(
        self, name: str, operands: Mapping[str, Value], shape: tuple[Dim, ...], dtype: DType | None = None, **attrs: Any
    ) -> Value:
        y = self.activation(name, *shape, dtype=dtype)
        self.op(name, {**operands, "y": y}, attrs)
        return y

    def embed(self, weight: Value) -> Value:
        """Embedding of the step's tokens, the beginning of the residual stream; weight [vocabulary, hidden]."""
        return self._unary("embed", {"tokens": self.tokens, "weight": weight}, ("T", weight.shape[1]), RESIDUAL)

    def rms_norm(self, x: Value, weight: Value, eps: float) -> Value:
        """Root mean square norm over the last dimension."""
        return self._unary("rms_norm", {"x": x, "weight": weight}, x.shape, eps=eps)

    def add(self, x: Value, z: Value) -> Value:
        """x + z, of the type of x: the residual stream stays what it is."""
        return self._unary("add", {"x": x, "z": z}, x.shape, x.dtype)

    def linear(self, x: Value, weight: Value, dtype: DType | None = None) -> Value:
        """x · weightᵀ with weight [out, in]; ``dtype`` of the result, default the activation type."""
        return self._unary("linear", {"x": x, "weight": weight}, (x.shape[0], weight.shape[0]), dtype)

    def head_rms_norm(self, x: Value, weight: Value, eps: float) -> Value:
        """Root mean square norm of each head of x [T, heads·d] with one weight [d]."""
        return self._unary("head_rms_norm", {"x": x, "weight": weight}, x.shape, eps=eps)

    def gated_rms_norm(self, x: Value, gate: Value, weight: Value, eps: float) -> Value:
        """head_rms_norm of x, times silu(gate), with gate of the shape of x."""
        return self._unary("gated_rms_norm", {"x": x, "gate": gate, "weight": weight}, x.shape, eps=eps)

    def l2_norm(self, x: Value, heads: int, head_dim: int, eps: float) -> Value:
        """The first ``heads`` heads of ``head_dim`` features over their length; the rest of x passes through."""
        return self._unary("l2_norm", {"x": x}, x.shape, heads=heads, head_dim=head_dim, eps=eps)

    def sigmoid_mul(self, x: Value, gate: Value) -> Value:
        """x · sigmoid(gate), with gate of the shape of x, or [T, 1]."""
        return self._unary("sigmoid_mul", {"x": x, "gate": gate}, x.shape)

    def moe_route(self, logits: Value, top_k: int, *, normalise: bool, scale: float = 1.0) -> tuple[Value, Value]:
        """Experts (int32) and weights (float32), both [T, top_k], by softmax of float32 ``logits`` [T, experts]."""
        attrs = {"top_k": top_k, "normalise": normalise, "scale": scale}
        return self._route("moe_route", {"logits": logits}, top_k, attrs)

    def moe_route_sigmoid(
        self, logits: Value, bias: Value, top_k: int, *, groups: int, top_groups: int, normalise: bool, scale: float
    ) -> tuple[Value, Value]:
        """As moe_route, by sigmoid; ``bias`` [experts] counts for the choice, which the best ``top_groups`` are open to."""
        attrs = {"top_k": top_k, "groups": groups, "top_groups": top_groups, "normalise": normalise, "scale": scale}
        return self._route("moe_route_sigmoid", {"logits": logits, "bias": bias}, top_k, attrs)

    def _route(
        self, name: str, operands: Mapping[str, Value], top_k: int, attrs: Mapping[str, Any]
    ) -> tuple[Value, Value]:
        experts = self.activation("experts", "T", top_k, dtype=DType.I32)
        weights = self.activation("weights", "T", top_k, dtype=DType.F32)
        self.op(name, {**operands, "experts": experts, "weights": weights}, attrs)
        return experts, weights

    def moe_experts(self, x: Value, routed: tuple[Value, Value], gate: Value, up: Value, down: Value) -> Value:
        """The routed experts of x, weighted; gate and up [experts, size, hidden], down [experts, hidden, size]."""
        experts, weights = routed
        operands = {"x": x, "experts": experts, "weights": weights, "gate": gate, "up": up, "down": down}
        return self._unary("moe_experts", operands, x.shape)

    def bias_add(self, x: Value, bias: Value) -> Value:
        """x + bias, one vector for every row."""
        return self._unary("bias_add", {"x": x, "bias": bias}, x.shape)

    def silu_mul(self, gate: Value, up: Value) -> Value:
        """silu(gate) · up."""
        return self._unary("silu_mul", {"gate": gate, "up": up}, gate.shape)

    def gelu_mul(self, gate: Value, up: Value) -> Value:
        """gelu(gate) · up, with gelu by tanh."""
        return self._unary("gelu_mul", {"gate": gate, "up": up}, gate.shape)

    def rope(self, x: Value, inv_freq: Value, heads: int, head_dim: int, scale: float = 1.0) -> Value:
        """Rotate the first 2·len(inv_freq) dimensions of each head by the token's position."""
        operands = {"x": x, "positions": self.positions, "inv_freq": inv_freq}
        return self._unary("rope", operands, x.shape, heads=heads, head_dim=head_dim, scale=scale)

    def attention(self, q: Value, k: Value, v: Value, group: str, layer: int, q_heads: int, scale: float) -> Value:
        """Append k and v [T, kv_heads·head_dim] to ``layer`` of the cache group, then attend with q [T, q_heads·head_dim].

        The group's CacheSpec gives heads, head size and window. Raises ValueError for an unknown group, or one without pages.
        """
        spec = self._group(group, paged=True)
        index = [cache.group for cache in self._spec.caches if cache.paged].index(group)
        cache = self._cache(spec)
        attrs = {
            "layer": layer,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "page_tokens": self._layout.page_tokens,
            "slot_stride": self._layout.slots.stride,
            "table_offset": self._layout.slots.table_offset(index),
        }
        where = {"row_slot": self._row_slot, "slots": self._slots, "cache": cache}
        append = {"k": k, "v": v, "positions": self.positions, "token_row": self._token_row, **where}
        self.op("kv_append", append, attrs)
        window = spec.window if spec.kind == "sliding" and spec.window else 0
        return self._unary(
            "paged_attention", {"q": q, "cu_q": self._cu_q, **where}, q.shape,
            None, **attrs, q_heads=q_heads, scale=scale, window=window,
        )  # fmt: skip

    def causal_conv1d(self, x: Value, weight: Value, group: str, layer: int) -> Value:
        """silu of the convolution of x [T, channels] along each sequence with weight [channels, width].

        ``layer`` of the recurrent group, of state_shape [width - 1, channels], holds the inputs before. Raises ValueError for a group
        without states.
        """
        operands = {"x": x, "weight": weight, **self._recurrent(group)}
        stride = self._layout.slots.stride
        return self._unary("causal_conv1d", operands, x.shape, layer=layer, slot_stride=stride)

    def gated_delta_rule(
        self, qkv: Value, gates: tuple[Value, Value], decay: tuple[Value, Value], group: str, layer: int,
        heads: tuple[int, int], dims: tuple[int, int], scale: float,
    ) -> Value:  # fmt: skip
        """Linear attention of packed queries, keys and values over ``layer`` of a group of state_shape [value heads, dims].

        ``gates`` are a and b [T, value heads], ``decay`` a_log and dt_bias [value heads]; ``heads`` and ``dims`` are those of keys, then
        of values. The result is [T, value heads · value dimension]. Raises ValueError for a group without states.
        """
        operands = {
            "qkv": qkv, "a": gates[0], "b": gates[1], "a_log": decay[0], "dt_bias": decay[1], **self._recurrent(group),
        }  # fmt: skip
        return self._unary(
            "gated_delta_rule", operands, ("T", heads[1] * dims[1]), layer=layer, key_heads=heads[0],
            value_heads=heads[1], key_dim=dims[0], value_dim=dims[1], scale=scale, slot_stride=self._layout.slots.stride,
        )  # fmt: skip

    def _recurrent(self, group: str) -> dict[str, Value]:
        """What every op with a recurrent state takes: its rows, and the states of all layers and places."""
        spec = self._group(group, paged=False)
        shape = (spec.layers, self._layout.places, *spec.state_shape)
        state = self._recorder.value(f"state.{group}", "state", shape, DType.F32)
        return {"cu_q": self._cu_q, "row_slot": self._row_slot, "slots": self._slots, "state": state}

    def _group(self, group: str, *, paged: bool) -> CacheSpec:
        fitting = {spec.group: spec for spec in self._spec.caches if spec.paged == paged}
        if group not in fitting:
            raise ValueError(
                f"cache group {group} is not among {[*fitting]}, which {'have' if paged else 'need no'} pages"
            )
        return fitting[group]

    def _cache(self, spec: CacheSpec) -> Value:
        page = (2, spec.kv_heads, self._layout.page_tokens, spec.head_dim)
        return self._recorder.value(f"cache.{spec.group}", "cache", (spec.layers, *page))

    def gather_rows(self, x: Value) -> Value:
        """The rows [R, features] whose logits are wanted this step."""
        rows = self._recorder.value("logits_rows", "input", ("R",), DType.I32)
        return self._unary("gather_rows", {"x": x, "logits_rows": rows}, ("R", x.shape[1]), x.dtype)

    def logits(self, x: Value, weight: Value) -> Value:
        """The head, with which a forward pass ends: float32 logits [R, vocabulary] of x, weight [vocabulary, hidden]."""
        return self.linear(x, weight, DType.F32)

    def finish(self, logits: Value) -> Program:
        """End the forward segment at float32 ``logits`` [R, vocabulary] and add the sampling segment."""
        self._recorder.end_segment("forward")
        value = self._recorder.value
        sample_row = value("sample_row", "input", ("R",), DType.I32)
        mask = value("mask", "state", (self._layout.slots.slots, -(-self._spec.vocab_size // 32)), DType.U32)
        stride = {"slot_stride": self._layout.slots.stride}
        where = {"sample_row": sample_row, "row_slot": self._row_slot, "slots": self._slots}
        processed = self.activation("processed", *logits.shape, dtype=DType.F32)
        self.op(
            "process_logits",
            {"logits": logits, **where, "penalty": self._penalty, "mask": mask, "y": processed},
            {**stride, "bias_start": self._layout.slots.bias_start},
        )
        sampled = value("sampled", "activation", ("R",), DType.I32)
        self.op("sample", {"logits": processed, **where, "cu_q": self._cu_q, "sampled": sampled}, stride)
        wide = 1 + MAX_TOP_LOGPROBS
        values = value("logprob_values", "activation", ("R", wide), DType.F32)
        ids = value("logprob_ids", "activation", ("R", wide), DType.I32)
        scored = value("scored", "input", ("R", 2), DType.I32)
        told = {"logits": logits, "sampled": sampled, "scored": scored, "values": values, "ids": ids}
        self.op("logprobs", {**told, **where}, stride)
        self.op("advance", {"sampled": sampled, **where, "cu_q": self._cu_q}, stride)
        self._recorder.end_segment("sample")
        return self._recorder.finish((sampled, values, ids, logits))


class HiddenBuilder(ForwardBuilder):
    """Records the same pass for vectors of texts: without a head, its result are the hidden states [T, hidden] of all tokens."""

    def gather_rows(self, x: Value) -> Value:
        """All rows: which of them count is up to whoever pools them."""
        return x

    def logits(self, x: Value, weight: Value) -> Value:
        """The hidden states themselves."""
        return x

    def finish(self, logits: Value) -> Program:
        """The program, of one segment. Raises PluginError when the pass did not end with ``logits``."""
        if logits.shape != ("T", self._spec.hidden_size):
            raise PluginError(
                f"the family {self._spec.model_type} gives no hidden states",
                f"its step ends with {logits.name} {logits.shape}, not with the builder's logits()",
                "serve this model with a newer release of the family's plugin",
            )
        self._recorder.end_segment("forward")
        return self._recorder.finish((logits,))


class Recordable(Protocol):
    """The part of a ModelWeightLoader that records."""

    def record(self, spec: ModelSpec, step: Any) -> Value:
        """Record the forward pass; returns the logits."""
        ...


def record(
    loader: Recordable, spec: ModelSpec, layout: StepLayout, ops: Mapping[str, Op] = PRIMITIVES, *, hidden: bool = False
) -> Program:
    """The whole step program of a model; ``hidden``: up to its hidden states. Raises PluginError where the family has none to give."""
    builder = (HiddenBuilder if hidden else ForwardBuilder)(spec, layout, ops)
    return builder.finish(loader.record(spec, builder))
