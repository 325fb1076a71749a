"""config.json of MiniMax M2 → ModelSpec. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from atlas_core.model.config import ConfigReader, contradiction, token_ids
from atlas_core.model.rope import Rope, read_rope
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import CacheSpec, ModelSpec

GROUP = "attention"
"""The one cache group: all layers look alike."""
_HARMLESS = (
    # Training.
    "router_aux_loss_coef", "router_jitter_noise", "output_router_logits",
    # Drafting layers are kept aside.
    "use_mtp", "num_mtp_modules", "mtp_transformer_layers",
)  # fmt: skip


class MiniMaxConfig(Struct, frozen=True):
    """Dimensions in elements. ``active`` of ``experts`` of ``expert_size`` work on a token."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    experts: int
    active: int
    expert_size: int


def read_config(config: Mapping[str, Any], model_type: str) -> ModelSpec:
    """Every key is read or known to be harmless. Raises CheckpointError naming the key at fault."""
    reader = ConfigReader(config)
    heads, kv_heads = reader.heads()
    layers = reader.positive("num_hidden_layers")
    _only_what_is_known(reader, layers)
    experts, active = reader.positive("num_local_experts"), reader.positive("num_experts_per_tok")
    if active > experts:
        raise contradiction("num_experts_per_tok", f"{active} of {experts} experts")
    head_dim = reader.positive("head_dim")
    family = MiniMaxConfig(
        heads, kv_heads, head_dim, _rope(reader, head_dim), float(reader.get("rms_norm_eps", (int, float))),
        experts, active, reader.positive("intermediate_size"),
    )  # fmt: skip
    spec = ModelSpec(
        model_type=model_type,
        hidden_size=reader.positive("hidden_size"),
        layers=layers,
        vocab_size=reader.positive("vocab_size"),
        max_position=reader.positive("max_position_embeddings"),
        dtype=reader.dtype(DType.BF16),
        caches=(CacheSpec(GROUP, "full", layers, kv_heads, head_dim),),
        eos_token_ids=token_ids(reader.get("eos_token_id", (int, list), None)),
        bos_token_id=reader.get("bos_token_id", int, None),
        tied_embeddings=reader.get("tie_word_embeddings", bool, False),
        family=family,
    )
    reader.finish(_HARMLESS)
    return spec


def _only_what_is_known(reader: ConfigReader, layers: int) -> None:
    """What the family's configuration can say, and no published model says otherwise."""
    reader.expect("hidden_act", ("silu",), "silu")
    reader.expect("attention_bias", (False,), False)
    reader.expect("sliding_window", (None,), None)
    reader.expect("scoring_func", ("sigmoid",), "sigmoid")
    reader.expect("use_routing_bias", (True,), True)
    reader.expect("use_qk_norm", (True,), True)
    reader.expect("qk_norm_type", ("per_layer",), "per_layer")
    reader.expect("shared_intermediate_size", (0,), 0)
    # 1 is a layer of full attention; the elder MiniMax models had linear ones.
    reader.expect("attn_type_list", ([1] * layers,), [1] * layers)


def _rope(reader: ConfigReader, head_dim: int) -> Rope:
    """``rotary_dim`` dimensions of a head turn; newer files say ``partial_rotary_factor``, or both."""
    rotary_dim = reader.get("rotary_dim", int, None)
    rope = read_rope(reader)
    if rotary_dim is None or rope.rotated(head_dim) == rotary_dim:
        return rope
    if rope.partial != 1.0:
        raise contradiction("rotary_dim", f"partial_rotary_factor {rope.partial} rotates {rope.rotated(head_dim)}")
    rope = Rope(rope.theta, rope.kind, rope.parameters, rotary_dim / head_dim)
    if rope.rotated(head_dim) != rotary_dim:
        raise CheckpointError(f"rotary_dim is {rotary_dim}", f"a head has {head_dim} dimensions", "correct config.json")
    return rope
