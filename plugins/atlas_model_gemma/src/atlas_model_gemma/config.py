"""config.json of Gemma 3 → ModelSpec. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from atlas_core.model.config import ConfigReader, contradiction, token_ids
from atlas_core.model.rope import Rope, read_rope
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import CacheSpec, ModelSpec

SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers, which are the cache groups too."""
_DEFAULTS: Mapping[str, int] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
    "max_position_embeddings": 131072, "query_pre_attn_scalar": 256,
}  # fmt: skip
"""What files of the models with pictures leave out of ``text_config``, as the reference implementation fills it in."""
_ROPES = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor")
_HARMLESS = (
    # How the reference implementation keeps its cache.
    "cache_implementation",
    # Pictures are refused before they reach the model.
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index", "boi_token_id",
    "eoi_token_id", "image_token_id",
)  # fmt: skip


class GemmaConfig(Struct, frozen=True):
    """Sizes in elements. ``kinds`` has SLIDING or FULL for each layer; ``ropes`` the rotary positions of each kind.

    ``scale`` multiplies scores of attention.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    scale: float
    kinds: tuple[str, ...]
    ropes: Mapping[str, Rope]


def read_config(config: Mapping[str, Any], model_type: str) -> ModelSpec:
    """Every key is read or known to be harmless. Raises CheckpointError naming the key at fault."""
    plain, ropes = _split_ropes(config)
    reader = ConfigReader(plain)
    heads, kv_heads = reader.heads(_DEFAULTS["num_attention_heads"], _DEFAULTS["num_key_value_heads"])
    head_dim = _positive(reader, "head_dim")
    _only_what_is_known(reader)
    kinds, window = _kinds(reader, reader.positive("num_hidden_layers")), reader.positive("sliding_window")
    family = GemmaConfig(
        heads, kv_heads, head_dim, reader.positive("intermediate_size"),
        float(reader.get("rms_norm_eps", (int, float), 1e-6)), _scale(reader), kinds, ropes,
    )  # fmt: skip
    caches = (
        CacheSpec(SLIDING, "sliding", kinds.count(SLIDING), kv_heads, head_dim, window),
        CacheSpec(FULL, "full", kinds.count(FULL), kv_heads, head_dim),
    )
    spec = ModelSpec(
        model_type=model_type,
        hidden_size=reader.positive("hidden_size"),
        layers=len(kinds),
        vocab_size=_positive(reader, "vocab_size"),
        max_position=_positive(reader, "max_position_embeddings"),
        dtype=reader.dtype(),
        caches=tuple(cache for cache in caches if cache.layers),
        eos_token_ids=token_ids(reader.get("eos_token_id", (int, list), None)),
        bos_token_id=reader.get("bos_token_id", int, None),
        tied_embeddings=reader.get("tie_word_embeddings", bool, True),
        family=family,
    )
    reader.finish(_HARMLESS)
    return spec


def _positive(reader: ConfigReader, key: str) -> int:
    return reader.positive(key, _DEFAULTS[key])


def _only_what_is_known(reader: ConfigReader) -> None:
    """What the family's configuration can say, and no model of the third generation says otherwise."""
    reader.expect("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    reader.expect("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    reader.expect("attention_bias", (False,), False)
    reader.expect("attn_logit_softcapping", (None,), None)
    reader.expect("final_logit_softcapping", (None,), None)
    reader.expect("use_bidirectional_attention", (False,), False)


def _scale(reader: ConfigReader) -> float:
    given = reader.get("query_pre_attn_scalar", (int, float), _DEFAULTS["query_pre_attn_scalar"])
    if given <= 0:
        raise CheckpointError(f"query_pre_attn_scalar is {given}", "it must be above zero", "correct config.json")
    return float(given**-0.5)


def _kinds(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """``layer_types``, or every ``sliding_window_pattern``-th layer full; where both stand, the former counts (as in the reference)."""
    pattern = reader.positive("sliding_window_pattern", reader.positive("_sliding_window_pattern", 6))
    derived = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    kinds = tuple(map(str, reader.get("layer_types", list, derived)))
    if len(kinds) != layers or set(kinds) - {SLIDING, FULL}:
        raise CheckpointError(
            f"layer_types in config.json has {len(kinds)} entries of {sorted(set(kinds))}",
            f"there are {layers} layers, each {SLIDING} or {FULL}",
            "correct the file",
        )
    return kinds


def _split_ropes(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Rope]]:
    """The configuration without its rotary keys, and the positions of both kinds of layers.

    Scaling is for full layers; those with a window turn by ``rope_local_base_freq``. Newer files have ``rope_parameters`` for
    each kind instead.
    """
    inner = config.get("text_config") or {}
    given = {key: value for level in (config, inner) for key, value in level.items() if key in _ROPES}
    plain = {key: value for key, value in config.items() if key not in _ROPES}
    if inner:
        plain["text_config"] = {key: value for key, value in inner.items() if key not in _ROPES}
    local = given.pop("rope_local_base_freq", None)
    own = given.get("rope_parameters") or {}
    if FULL in own or SLIDING in own:
        if set(own) != {FULL, SLIDING} or local is not None or len(given) > 1:
            raise contradiction(
                "rope_parameters", f"they are for {sorted(own)}, beside {sorted({*given, 'rope_theta'})}"
            )
        return plain, {kind: read_rope(ConfigReader({"rope_parameters": own[kind]})) for kind in (SLIDING, FULL)}
    return plain, {
        SLIDING: read_rope(ConfigReader({"rope_theta": local}), 10_000.0),
        FULL: read_rope(ConfigReader(given), 1_000_000.0),
    }
