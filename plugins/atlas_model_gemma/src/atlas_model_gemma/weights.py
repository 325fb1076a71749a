"""Where the weights of Gemma 3 lie, under each naming scheme. Pure."""

from collections.abc import Mapping

from msgspec import Struct

from atlas_core.contracts.model import NameMap, WeightSource
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import ModelSpec

_HF = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attended_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "inner_norm": "post_feedforward_layernorm",
}
_GGUF = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attended_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "inner_norm": "post_ffw_norm",
}
_AFTER = ("attended_norm", "inner_norm")
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""Of the text model alone, and beside an encoder of pictures, as newer and older files name it."""


class _Scheme(Struct, frozen=True):
    """Names of tensors, each without its ``.weight``; alternatives in order. ``offset`` is what norms are stored less."""

    parts: Mapping[str, str]
    layers: tuple[str, ...]
    embed: tuple[str, ...]
    final_norm: tuple[str, ...]
    head: tuple[str, ...]
    offset: float = 0.0
    ignored: tuple[str, ...] = ()


_SCHEMES = {
    "hf": _Scheme(
        _HF,
        tuple(f"{prefix}layers." for prefix in _PREFIXES),
        tuple(f"{prefix}embed_tokens" for prefix in _PREFIXES),
        tuple(f"{prefix}norm" for prefix in _PREFIXES),
        ("lm_head", "language_model.lm_head"),
        1.0,
        (
            "model.vision_tower.*", "vision_tower.*", "model.multi_modal_projector.*", "multi_modal_projector.*",
            "*.rotary_emb.inv_freq", "*.rotary_emb_local.inv_freq",
        ),
    ),
    "gguf": _Scheme(_GGUF, ("blk.",), ("token_embd",), ("output_norm",), ("output",)),
}  # fmt: skip


def name_map(naming: str, spec: ModelSpec) -> NameMap:
    """Canonical names are ``embed``, ``final_norm``, ``head`` and ``layers.N.<part>``.

    What is added to the residual stream is divided by the square root of the hidden size (see the loader), and so are the weights
    of the norms that it comes from. Raises CheckpointError for a naming scheme that this family does not know.
    """
    scheme = _SCHEMES.get(naming)
    if scheme is None:
        raise CheckpointError(
            f"tensors named in the scheme {naming!r} are not known to the Gemma family",
            f"it reads the schemes {' and '.join(_SCHEMES)}",
            "convert the checkpoint, or extend the model plugin",
        )
    weights = {
        "embed": WeightSource(_stored(scheme.embed)),
        "final_norm": WeightSource(_stored(scheme.final_norm), offset=scheme.offset),
        "head": WeightSource(_stored(scheme.head), tied_to="embed" if spec.tied_embeddings else None),
    }
    for layer in range(spec.layers):
        for part, name in scheme.parts.items():
            names = _stored(tuple(f"{prefix}{layer}.{name}" for prefix in scheme.layers))
            factor = spec.hidden_size**-0.5 if part in _AFTER else 1.0
            offset = scheme.offset if part.endswith("norm") else 0.0
            weights[f"layers.{layer}.{part}"] = WeightSource(names, offset=offset, factor=factor)
    return NameMap(weights, scheme.ignored)


def _stored(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in names)
