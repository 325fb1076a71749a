"""Where the weights of MiniMax M2 lie. Pure."""

from atlas_core.contracts.model import ExpertStack, NameMap, WeightSource
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import ModelSpec
from atlas_model_minimax.config import MiniMaxConfig

_PARTS = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "router": "block_sparse_moe.gate.weight",
    "router.bias": "block_sparse_moe.e_score_correction_bias",
}
_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
_IGNORED = ("mtp.*", "model.mtp.*", "*.rotary_emb.inv_freq")
"""Drafting layers, and frequencies that follow from the configuration."""


def name_map(naming: str, spec: ModelSpec) -> NameMap:
    """Canonical names are ``embed``, ``final_norm``, ``head`` and ``layers.N.<part>``; experts are stacks of one tensor each.

    Raises CheckpointError for a naming scheme that this family does not know.
    """
    if naming != "hf":
        raise CheckpointError(
            f"tensors named in the scheme {naming!r} are not known to the MiniMax family",
            "it reads the scheme hf",
            "use the model's safetensors checkpoint, or extend the model plugin",
        )
    family = spec.family
    assert isinstance(family, MiniMaxConfig)
    weights = {
        "embed": WeightSource(("model.embed_tokens.weight",)),
        "final_norm": WeightSource(("model.norm.weight",)),
        "head": WeightSource(("lm_head.weight",), tied_to="embed" if spec.tied_embeddings else None),
    }
    for layer in range(spec.layers):
        stem = f"layers.{layer}."
        for part, name in _PARTS.items():
            weights[stem + part] = WeightSource((f"model.{stem}{name}",))
        for part, name in _EXPERTS.items():
            stored = tuple(
                f"model.{stem}block_sparse_moe.experts.{expert}.{name}.weight" for expert in range(family.experts)
            )
            weights[f"{stem}experts.{part}"] = WeightSource((), stack=ExpertStack((stored,)))
    return NameMap(weights, _IGNORED)
