"""config.json of the Qwen family → ModelSpec. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from atlas_core.model.config import ConfigReader, contradiction, token_ids
from atlas_core.model.rope import Rope, read_rope
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import CacheSpec, ModelSpec
from atlas_model_qwen.rotary import split_sections

FULL, LINEAR = "full_attention", "linear_attention"
ATTENTION, CONVOLUTION, DELTA = "attention", "linear.convolution", "linear.delta"
"""Cache groups: pages of the full attention layers, and the two states of the linear ones."""

_HARMLESS = (
    # Windows and their layers mean nothing without use_sliding_window, which is refused.
    "sliding_window", "max_window_layers",
    # Training.
    "router_aux_loss_coef", "output_router_logits",
    # Drafting layers are kept aside; pictures are refused before they reach the model.
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "vision_config", "language_model_only", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
)  # fmt: skip


class Traits(Struct, frozen=True):
    """In what a model_type differs from the others; config.json does not say it.

    ``qk_norm``: queries and keys are normalised. ``qkv_bias``: their projections have biases (else ``attention_bias`` decides).
    ``centred``: weights of norms are stored less one. ``hybrid``: layers of linear attention, and full ones with a gated result.
    ``experts``: mixtures. ``shared``: with an expert for all tokens. ``nested``: weights of the text model stand below another name.
    """

    qk_norm: bool = True
    qkv_bias: bool = False
    hybrid: bool = False
    experts: bool = False
    shared: bool = False
    nested: bool = False

    @property
    def centred(self) -> bool:
        """Norm weights count from one."""
        return self.hybrid


TRAITS: Mapping[str, Traits] = {
    "qwen2": Traits(qk_norm=False, qkv_bias=True),
    "qwen3": Traits(),
    "qwen3_moe": Traits(experts=True),
    "qwen3_next": Traits(hybrid=True, experts=True, shared=True),
    "qwen3_5": Traits(hybrid=True, nested=True),
    "qwen3_5_moe": Traits(hybrid=True, experts=True, shared=True, nested=True),
    "qwen3_vl": Traits(nested=True),
    "qwen3_vl_moe": Traits(experts=True, nested=True),
}


class Experts(Struct, frozen=True):
    """A mixture: ``count`` experts of ``size``, ``active`` a token; ``shared`` is the size of the one for all, or 0.

    ``normalise``: the weights of a token's experts are made to sum up to one. ``layers`` has the layers that are mixtures.
    """

    count: int
    active: int
    size: int
    shared: int
    normalise: bool
    layers: frozenset[int]


class Linear(Struct, frozen=True):
    """Layers of linear attention: heads and sizes of keys and values, and the width of the convolution before them.

    ``stored_key_heads`` of the key heads are in the checkpoint, and the others are these again, in turns.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    stored_key_heads: int

    @property
    def key_features(self) -> int:
        """Features of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_features(self) -> int:
        """Features of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Features that pass through the convolution: queries, keys, values."""
        return 2 * self.key_features + self.value_features


class QwenConfig(Struct, frozen=True):
    """Sizes in elements. ``kinds`` has FULL or LINEAR for each layer; ``intermediate_size`` is that of the dense ones."""

    traits: Traits
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    rope: Rope
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    gated: bool
    intermediate_size: int
    kinds: tuple[str, ...]
    linear: Linear | None
    experts: Experts | None


def read_config(config: Mapping[str, Any], model_type: str) -> ModelSpec:
    """Every key is read or known to be harmless. Raises CheckpointError naming the key at fault."""
    traits = TRAITS[model_type]
    plain, sections = split_sections(_one_place(config))
    reader = ConfigReader(plain)
    hidden = reader.positive("hidden_size")
    heads, kv_heads = reader.heads()
    head_dim = _head_dim(reader, traits, hidden, heads)
    rope = read_rope(reader)
    rotated = rope.rotated(head_dim)
    if sections and sum(sections) * 2 != rotated:
        raise contradiction("mrope_section", f"{list(sections)} does not sum up to {rotated // 2} pairs")
    reader.expect("hidden_act", ("silu",), "silu")
    reader.expect("use_sliding_window", (False,), False)
    reader.expect("qkv_bias", (traits.qkv_bias,), traits.qkv_bias)
    reader.expect("use_qk_norm", (traits.qk_norm,), traits.qk_norm)
    bias = reader.get("attention_bias", bool, False) and not traits.qkv_bias
    if traits.hybrid:
        reader.expect("attention_bias", (False,), False)
    layers = reader.positive("num_hidden_layers")
    kinds = _kinds(reader, traits, layers)
    linear = _linear(reader) if traits.hybrid else None
    experts = _experts(reader, traits, layers)
    dense = experts is None or len(experts.layers) < layers
    family = QwenConfig(
        traits, heads, kv_heads, head_dim, rotated, rope,
        float(reader.get("rms_norm_eps", (int, float))), traits.qkv_bias or bias, bias,
        reader.get("attn_output_gate", bool, True) if traits.hybrid else False,
        reader.positive("intermediate_size") if dense else reader.get("intermediate_size", int, 0), kinds, linear, experts,
    )  # fmt: skip
    spec = ModelSpec(
        model_type=model_type,
        hidden_size=hidden,
        layers=layers,
        vocab_size=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        dtype=reader.dtype(),
        caches=_caches(family),
        eos_token_ids=token_ids(reader.get("eos_token_id", (int, list), None)),
        bos_token_id=reader.get("bos_token_id", int, None),
        tied_embeddings=reader.get("tie_word_embeddings", bool, False),
        family=family,
    )
    reader.finish(_HARMLESS)
    return spec


def _one_place(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Whether the head is tied is the outer model's to say, where there is one: libraries write a default inside."""
    inner = config.get("text_config")
    if inner is None or "tie_word_embeddings" not in config:
        return config
    return {**config, "text_config": {k: v for k, v in inner.items() if k != "tie_word_embeddings"}}


def _head_dim(reader: ConfigReader, traits: Traits, hidden: int, heads: int) -> int:
    given = reader.get("head_dim", int, None)
    if given is None and traits.qk_norm:
        reader.get("head_dim", int)  # said by every real file; the quotient is wrong for most of them
    if given is None and hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim",
            "the size of a head cannot be derived",
            "add head_dim to config.json",
        )
    dim = reader.positive("head_dim", hidden // heads)
    if dim % 2:
        raise CheckpointError(
            f"head_dim is {dim}", "rotary positions rotate pairs of dimensions", "correct config.json"
        )
    return dim


def _kinds(reader: ConfigReader, traits: Traits, layers: int) -> tuple[str, ...]:
    """``layer_types``, or every ``full_attention_interval``-th layer full; where both stand they must say the same."""
    given = reader.get("layer_types", list, None)
    kinds = tuple(map(str, given)) if given is not None else (FULL,) * layers
    known = {FULL}
    if traits.hybrid:
        known = {FULL, LINEAR}
        interval = reader.get("full_attention_interval", int, None)
        if given is None or interval is not None:
            interval = reader.positive("full_attention_interval")
        derived = tuple(LINEAR if interval and (layer + 1) % interval else FULL for layer in range(layers))
        if given is not None and interval and derived != kinds:
            raise contradiction("layer_types", f"every layer whose number {interval} divides would be a full one")
        kinds = derived if given is None else kinds
    if len(kinds) != layers or set(kinds) - known:
        raise CheckpointError(
            f"layer_types in config.json has {len(kinds)} entries of {sorted(set(kinds))}",
            f"there are {layers} layers, each of {sorted(known)}",
            "correct the file",
        )
    return kinds


def _linear(reader: ConfigReader) -> Linear:
    key_heads = reader.positive("linear_num_key_heads")
    linear = Linear(
        key_heads, reader.positive("linear_num_value_heads"), reader.positive("linear_key_head_dim"),
        reader.positive("linear_value_head_dim"), reader.positive("linear_conv_kernel_dim"),
        reader.positive("linear_stored_key_heads", key_heads),
    )  # fmt: skip
    reader.expect("mamba_ssm_dtype", ("float32",), "float32")
    # The gate behind the norm of linear attention; that of full attention is a sigmoid in every model of the family.
    reader.expect("output_gate_type", ("swish", "silu"), "swish")
    if linear.value_heads % linear.key_heads:
        raise CheckpointError(
            f"linear_num_value_heads {linear.value_heads} is not a multiple of linear_num_key_heads {linear.key_heads}",
            "each key head serves the same number of value heads",
            "correct config.json",
        )
    if key_heads % linear.stored_key_heads:
        raise contradiction(
            "linear_stored_key_heads", f"{key_heads} key heads are no multiple of {linear.stored_key_heads}"
        )
    if linear.width < 2:
        raise CheckpointError("linear_conv_kernel_dim is 1", "the convolution looks back", "correct config.json")
    return linear


def _experts(reader: ConfigReader, traits: Traits, layers: int) -> Experts | None:
    shared = reader.get("shared_expert_intermediate_size", int, 0)
    if not traits.experts:
        reader.expect("mlp_only_layers", ([],), [])
        return None
    if traits.shared != (shared > 0):
        raise CheckpointError(
            f"shared_expert_intermediate_size is {shared}",
            f"models of this type {'have' if traits.shared else 'do not have'} a shared expert",
            "correct config.json, or its model_type",
        )
    counts = {key: reader.get(key, int, None) for key in ("num_experts", "num_local_experts")}
    if len(set(counts.values()) - {None}) > 1:
        raise contradiction(
            "num_experts", f"{counts['num_experts']} beside num_local_experts {counts['num_local_experts']}"
        )
    count = reader.positive("num_experts", counts["num_local_experts"] or 0)
    active = reader.positive("num_experts_per_tok")
    if active > count:
        raise contradiction("num_experts_per_tok", f"{active} of {count} experts")
    step, dense = reader.positive("decoder_sparse_step", 1), reader.get("mlp_only_layers", list, [])
    if any(type(layer) is not int or not 0 <= layer < layers for layer in dense):
        raise CheckpointError(f"mlp_only_layers is {dense}", f"it names some of {layers} layers", "correct config.json")
    sparse = frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    # Only the first mixtures of the family left this open, and there it was off unless said otherwise.
    normalise = reader.get("norm_topk_prob", bool, traits.hybrid or traits.nested)
    return Experts(count, active, reader.positive("moe_intermediate_size"), shared, normalise, sparse)


def _caches(family: QwenConfig) -> tuple[CacheSpec, ...]:
    full = family.kinds.count(FULL)
    pages = CacheSpec(ATTENTION, "full", full, family.kv_heads, family.head_dim)
    linear, layers = family.linear, len(family.kinds) - full
    if linear is None or not layers:
        return (pages,)
    delta = (linear.value_heads, linear.key_dim, linear.value_dim)
    return (
        pages,
        CacheSpec(CONVOLUTION, "recurrent", layers, state_shape=(linear.width - 1, linear.channels)),
        CacheSpec(DELTA, "recurrent", layers, state_shape=delta),
    )
