"""Where the weights of the Qwen family lie, under each naming scheme. Pure."""

from collections.abc import Iterator

from atlas_core.contracts.model import ExpertStack, NameMap, WeightSource
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import ModelSpec
from atlas_model_qwen.config import FULL, Linear, QwenConfig

_HF = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q.bias": "self_attn.q_proj.bias",
    "k.bias": "self_attn.k_proj.bias",
    "v.bias": "self_attn.v_proj.bias",
    "o.bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "linear.a_log": "linear_attn.A_log",
    "linear.dt_bias": "linear_attn.dt_bias",
    "linear.convolution": "linear_attn.conv1d.weight",
    "linear.norm": "linear_attn.norm.weight",
    "linear.o": "linear_attn.out_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "shared.gate": "mlp.shared_expert.gate_proj.weight",
    "shared.up": "mlp.shared_expert.up_proj.weight",
    "shared.down": "mlp.shared_expert.down_proj.weight",
    "shared.weight": "mlp.shared_expert_gate.weight",
}
_GGUF = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q.bias": "attn_q.bias",
    "k.bias": "attn_k.bias",
    "v.bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "router": "ffn_gate_inp.weight",
    "experts.gate": "ffn_gate_exps.weight",
    "experts.up": "ffn_up_exps.weight",
    "experts.down": "ffn_down_exps.weight",
}
_GGUF_HYBRID = {
    "mlp_norm": "post_attention_norm.weight",
    "linear.a_log": "ssm_a",
    "linear.dt_bias": "ssm_dt.bias",
    "linear.norm": "ssm_norm.weight",
    "linear.o": "ssm_out.weight",
    "linear.z": "attn_gate.weight",
    "shared.gate": "ffn_gate_shexp.weight",
    "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight",
    "shared.weight": "ffn_gate_inp_shexp.weight",
}
"""What hybrids have besides, or under another name."""
_CENTRED = ("attention_norm", "mlp_norm", "q_norm", "k_norm")
_DRAFTS = 8
"""Drafting layers at most, which lie behind the others in files of GGUF."""
_TEXT, _NESTED = "model.", "model.language_model."
_KEPT_ASIDE = ("mtp.*", "model.visual.*", "visual.*", "*.rotary_emb.inv_freq")
"""Drafting layers, the picture encoder, and frequencies that follow from the configuration."""


def name_map(naming: str, spec: ModelSpec) -> NameMap:
    """Canonical names are ``embed``, ``final_norm``, ``head`` and ``layers.N.<part>``, with ``.bias`` for biases.

    Raises CheckpointError for a naming scheme that this family does not know, or in which this model is never stored.
    """
    family = spec.family
    assert isinstance(family, QwenConfig)
    if naming == "hf":
        return _hf(spec, family)
    if naming == "gguf" and (family.linear or not family.traits.nested):
        return _gguf(spec, family)
    raise CheckpointError(
        f"tensors named in the scheme {naming!r} are not known for {spec.model_type}",
        "the family reads hf, and gguf for all but its models for pictures",
        "use the model's safetensors checkpoint, or extend the model plugin",
    )


def _hf(spec: ModelSpec, family: QwenConfig) -> NameMap:
    prefixes = (_NESTED, _TEXT) if family.traits.nested else (_TEXT,)
    offset = 1.0 if family.traits.centred else 0.0

    def source(stem: str, rows: tuple[int, ...] | None = None, offset: float = 0.0) -> WeightSource:
        return WeightSource(tuple(prefix + stem for prefix in prefixes), rows, offset=offset)

    weights = {
        "embed": source("embed_tokens.weight"),
        "final_norm": source("norm.weight", offset=offset),
        "head": WeightSource(("lm_head.weight",), tied_to="embed" if spec.tied_embeddings else None),
    }
    for layer, kind in enumerate(family.kinds):
        stem = f"layers.{layer}."
        for part in _plain_parts(family, layer):
            added = offset if part in _CENTRED else 0.0
            weights[stem + part] = source(stem + _HF[part], offset=added)
        if kind == FULL and family.gated:
            for part, order in (("q", 0), ("q_gate", 1)):
                own = _halves(family.heads, family.head_dim, order)
                weights[stem + part] = source(stem + _HF["q"], own)
        if kind != FULL and family.linear:
            for part, (tensor, rows) in _projections(spec.model_type, family.linear).items():
                weights[stem + part] = source(f"{stem}linear_attn.{tensor}.weight", rows)
        if family.experts and layer in family.experts.layers:
            for part in ("gate", "up", "down"):
                stack = _stack(prefixes, stem, part, family.experts.count, family.experts.size, spec.hidden_size)
                weights[f"{stem}experts.{part}"] = WeightSource((), stack=stack)
    return NameMap(weights, _KEPT_ASIDE)


def _gguf(spec: ModelSpec, family: QwenConfig) -> NameMap:
    """Norms are stored as they are used, and decays as -exp(a_log) (llama.cpp's conversions)."""
    names = {**_GGUF, **_GGUF_HYBRID} if family.linear else _GGUF
    weights = {
        "embed": WeightSource(("token_embd.weight",)),
        "final_norm": WeightSource(("output_norm.weight",)),
        "head": WeightSource(("output.weight",), tied_to="embed" if spec.tied_embeddings else None),
    }
    for layer in range(spec.layers):
        sparse = family.experts is not None and layer in family.experts.layers
        stacks = ("experts.gate", "experts.up", "experts.down") if sparse else ()
        stem = f"blk.{layer}."
        for part in (*_plain_parts(family, layer), *stacks):
            if part != "linear.convolution":
                source = WeightSource((stem + names[part],), logarithm=part == "linear.a_log")
                weights[f"layers.{layer}.{part}"] = source
        if family.kinds[layer] == FULL and family.gated:
            for part, order in (("q", 0), ("q_gate", 1)):
                own = _halves(family.heads, family.head_dim, order)
                weights[f"layers.{layer}.{part}"] = WeightSource((stem + names["q"],), own)
        if family.kinds[layer] != FULL and family.linear:
            for part, (tensor, rows) in _gguf_projections(spec.model_type, family.linear).items():
                weights[f"layers.{layer}.{part}"] = WeightSource((stem + tensor,), rows)
    drafts = tuple(f"blk.{spec.layers + extra}.*" for extra in range(_DRAFTS)) if family.linear else ()
    return NameMap(weights, drafts)


def _gguf_projections(model_type: str, linear: Linear) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """As ``_projections``. Keys that are stored once and used by several groups of values are repeated, filters too."""
    key, stored = linear.key_dim, linear.stored_key_heads
    rows = None
    if stored != linear.key_heads:
        heads = [head % stored for head in range(linear.key_heads)]
        once = tuple(head * key + i for head in heads for i in range(key))
        values = range(2 * stored * key, 2 * stored * key + linear.value_features)
        rows = (*once, *(stored * key + row for row in once), *values)
    found: dict[str, tuple[str, tuple[int, ...] | None]] = {
        "linear.qkv": ("attn_qkv.weight", rows), "linear.convolution": ("ssm_conv1d.weight", rows),
        "linear.z": ("attn_gate.weight", None),
    }  # fmt: skip
    if model_type != "qwen3_next":
        return found | {"linear.b": ("ssm_beta.weight", None), "linear.a": ("ssm_alpha.weight", None)}
    shared = linear.value_heads // linear.key_heads
    narrow = _Fused(linear.key_heads, (shared, shared))
    return found | {"linear.b": ("ssm_ba.weight", narrow.rows(0)), "linear.a": ("ssm_ba.weight", narrow.rows(1))}


def _plain_parts(family: QwenConfig, layer: int) -> Iterator[str]:
    """The parts of a layer that are whole tensors."""
    yield "attention_norm"
    if family.kinds[layer] == FULL:
        yield from ("k", "v", "o")
        if not family.gated:
            yield "q"
        if family.qkv_bias:
            yield from ("q.bias", "k.bias", "v.bias")
        if family.o_bias:
            yield "o.bias"
        if family.traits.qk_norm:
            yield from ("q_norm", "k_norm")
    else:
        yield from ("linear.a_log", "linear.dt_bias", "linear.convolution", "linear.norm", "linear.o")
    yield "mlp_norm"
    if family.experts is None or layer not in family.experts.layers:
        yield from ("gate", "up", "down")
        return
    yield "router"
    if family.experts.shared:
        yield from ("shared.gate", "shared.up", "shared.down", "shared.weight")


def _halves(heads: int, dim: int, half: int) -> tuple[int, ...]:
    """Rows of the queries (half 0) or of their gates (1), which lie head by head behind one another."""
    return tuple((2 * head + half) * dim + i for head in range(heads) for i in range(dim))


def _projections(model_type: str, linear: Linear) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """(tensor, its rows or None for all) of the projections in front of linear attention.

    Canonical rows are those of all queries, then keys, then values. ``qwen3_next`` keeps two fused tensors instead, key head by
    key head: its query, its key, its values, their output gates; and the betas of its values, then their decays.
    """
    if model_type != "qwen3_next":
        return {
            "linear.qkv": ("in_proj_qkv", None), "linear.z": ("in_proj_z", None),
            "linear.b": ("in_proj_b", None), "linear.a": ("in_proj_a", None),
        }  # fmt: skip
    shared = linear.value_heads // linear.key_heads
    key, value = linear.key_dim, shared * linear.value_dim
    wide = _Fused(linear.key_heads, (key, key, value, value))
    narrow = _Fused(linear.key_heads, (shared, shared))
    return {
        "linear.qkv": ("in_proj_qkvz", (*wide.rows(0), *wide.rows(1), *wide.rows(2))),
        "linear.z": ("in_proj_qkvz", wide.rows(3)),
        "linear.b": ("in_proj_ba", narrow.rows(0)),
        "linear.a": ("in_proj_ba", narrow.rows(1)),
    }


class _Fused:
    """Rows of a tensor with, for each group, parts of these sizes."""

    def __init__(self, groups: int, sizes: tuple[int, ...]) -> None:
        self._groups = groups
        self._sizes = sizes

    def rows(self, part: int) -> tuple[int, ...]:
        """One part of every group."""
        start, stride = sum(self._sizes[:part]), sum(self._sizes)
        return tuple(group * stride + start + i for group in range(self._groups) for i in range(self._sizes[part]))


def _stack(prefixes: tuple[str, ...], stem: str, part: str, count: int, size: int, hidden: int) -> ExpertStack:
    """One tensor for all experts (gate above up), or one for each."""
    experts = [f"{prefix}{stem}mlp.experts." for prefix in prefixes]
    separate = tuple(tuple(f"{at}{expert}.{part}_proj.weight" for expert in range(count)) for at in experts)
    if part == "down":
        return ExpertStack(separate, tuple(at + "down_proj" for at in experts), hidden, (0, hidden))
    first = 0 if part == "gate" else size
    return ExpertStack(separate, tuple(at + "gate_up_proj" for at in experts), 2 * size, (first, first + size))
