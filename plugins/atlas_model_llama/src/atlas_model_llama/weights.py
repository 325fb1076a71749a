"""Where the weights of the Llama family lie, under each naming scheme. Pure."""

from collections.abc import Iterator
from functools import cache

from atlas_core.contracts.model import NameMap, WeightSource
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import ModelSpec
from atlas_model_llama.config import LlamaConfig

_HF = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GGUF = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_ATTENTION, _MLP = ("q", "k", "v", "o"), ("gate", "up", "down")


def name_map(naming: str, spec: ModelSpec) -> NameMap:
    """Canonical names are ``embed``, ``final_norm``, ``head`` and ``layers.N.<part>``, with ``.bias`` for biases.

    Raises CheckpointError for a naming scheme that this family does not know.
    """
    if naming == "hf":
        prefix, parts, ends = "model.layers", _HF, ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    elif naming == "gguf":
        prefix, parts, ends = "blk", _GGUF, ("token_embd.weight", "output_norm.weight", "output.weight")
        ignored = ("rope_freqs.weight",)
    else:
        raise CheckpointError(
            f"tensors named in the scheme {naming!r} are not known to the Llama family",
            "it reads the schemes hf and gguf",
            "convert the checkpoint, or extend the model plugin",
        )
    weights = {
        "embed": WeightSource((ends[0],)),
        "final_norm": WeightSource((ends[1],)),
        "head": WeightSource((ends[2],), tied_to="embed" if spec.tied_embeddings else None),
    }
    for canonical, part in _layer_parts(spec):
        for layer in range(spec.layers):
            stem = f"{prefix}.{layer}.{parts[part]}"
            name = f"layers.{layer}.{canonical}"
            order = row_order(spec, part) if naming == "gguf" else None
            if canonical.endswith(".bias"):
                stem = stem.removesuffix("weight") + "bias"
            weights[name] = WeightSource((stem,), order)
    return NameMap(weights, ignored)


def _layer_parts(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """(canonical name within a layer, part) of everything that a layer has."""
    family = spec.family
    assert isinstance(family, LlamaConfig)
    for part in _HF:
        yield part, part
    for part in (*(_ATTENTION if family.attention_bias else ()), *(_MLP if family.mlp_bias else ())):
        yield f"{part}.bias", part


def row_order(spec: ModelSpec, part: str) -> tuple[int, ...] | None:
    """GGUF's ``llama`` architecture stores the rows of q and k with the two halves of each head interleaved.

    Row 2i + j of a head in the file is row j·d/2 + i of the weight (d the head size). The answer gives the file's row for
    each row of the weight; None where nothing was moved.
    """
    family = spec.family
    assert isinstance(family, LlamaConfig)
    heads = {"q": family.heads, "k": family.kv_heads}.get(part)
    if heads is None:
        return None
    return _halves_apart(heads, family.head_dim)


@cache
def _halves_apart(heads: int, dim: int) -> tuple[int, ...]:
    return tuple(head * dim + 2 * i + j for head in range(heads) for j in range(2) for i in range(dim // 2))
