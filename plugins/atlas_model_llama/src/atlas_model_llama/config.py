"""config.json of the Llama family → ModelSpec. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from atlas_core.model.config import ConfigReader, token_ids
from atlas_core.model.rope import Rope, read_rope
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import CacheSpec, ModelSpec

GROUP = "attention"
"""The one cache group: all layers look alike."""


class LlamaConfig(Struct, frozen=True):
    """Dimensions in elements; ``rotated`` is the rotated part of a head."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: Rope
    attention_bias: bool
    mlp_bias: bool


def read_config(config: Mapping[str, Any], model_type: str) -> ModelSpec:
    """Every key is read or known to be harmless. Raises CheckpointError naming the key at fault."""
    reader = ConfigReader(config)
    hidden = reader.positive("hidden_size")
    heads, kv_heads = reader.heads()
    head_dim = (
        reader.positive("head_dim", None) if reader.get("head_dim", int, None) is not None else _divided(hidden, heads)
    )
    if head_dim % 2:
        raise CheckpointError(
            f"head_dim is {head_dim}", "rotary positions rotate pairs of dimensions", "correct config.json"
        )
    reader.expect("hidden_act", ("silu", "swish"), "silu")
    reader.expect("pretraining_tp", (1,), 1)
    reader.expect("rope_interleaved", (False,), False)
    layers = reader.positive("num_hidden_layers")
    window = reader.get("sliding_window", int, None) if model_type == "mistral" else None
    if window is not None and window <= 0:
        raise CheckpointError(
            f"sliding_window is {window}", "it counts tokens and must be above zero", "correct config.json"
        )
    family = LlamaConfig(
        heads, kv_heads, head_dim, reader.positive("intermediate_size"),
        float(reader.get("rms_norm_eps", (int, float))), read_rope(reader, 10000.0 if model_type == "llama" else None),
        reader.get("attention_bias", bool, False), reader.get("mlp_bias", bool, False),
    )  # fmt: skip
    spec = ModelSpec(
        model_type=model_type,
        hidden_size=hidden,
        layers=layers,
        vocab_size=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        dtype=reader.dtype(),
        caches=(CacheSpec(GROUP, "sliding" if window else "full", layers, kv_heads, head_dim, window),),
        eos_token_ids=token_ids(reader.get("eos_token_id", (int, list), None)),
        bos_token_id=reader.get("bos_token_id", int, None),
        tied_embeddings=reader.get("tie_word_embeddings", bool, False),
        family=family,
    )
    reader.finish()
    return spec


def _divided(hidden: int, heads: int) -> int:
    """head_dim where config.json leaves it out."""
    if hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim",
            "the size of a head cannot be derived",
            "add head_dim to config.json",
        )
    return hidden // heads
