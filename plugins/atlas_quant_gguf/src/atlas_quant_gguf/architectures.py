"""The architectures that files of GGUF may name: what each adds to the keys that all have."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from atlas_quant_gguf.keys import Keys
from atlas_quant_gguf.metadata import GgufHeader

_SOFTMAX = 1
_GEMMA_27B = 62
More = Callable[[Keys, Mapping[str, Any], GgufHeader], dict[str, Any]]
"""Keys of the architecture and the values that all have → further values of config.json, or others in their place."""


class Architecture(Struct, frozen=True):
    """``model_type`` and ``hub_class`` are its names on the Hub.

    ``partial``: a part of each head may be rotated. ``sparse``: there need be no dense network.
    """

    model_type: str
    hub_class: str
    more: More
    partial: bool = False
    sparse: bool = False


def _llama(keys: Keys, common: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    """Biases are there when their tensors are."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }


def _qwen2(keys: Keys, common: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3(keys: Keys, common: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": False}


def _qwen3_moe(keys: Keys, common: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": False, **_experts(keys)}


def _hybrid(keys: Keys, common: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    """What layers of linear attention add (llama.cpp's conversion of Qwen3-Next and Qwen3.5).

    Value heads of qwen35 are not grouped by key head: value head i belongs to key head i modulo their number. As no order of rows
    would undo that in the columns of the output projection, keys are repeated instead: there are as many as values, and
    ``linear_stored_key_heads`` says of how many. Drafting layers lie behind the others.
    """
    keys_stored, values = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    inner, layers = keys.integer("ssm.inner_size"), common["num_hidden_layers"]
    if inner % values or values % keys_stored:
        raise keys.bad(
            "ssm.inner_size", inner, f"{values} value heads of one size, a multiple of {keys_stored} key heads,"
        )
    tiled = keys.architecture != "qwen3next"
    rotated, head_dim = keys.integer("rope.dimension_count", common["head_dim"]), common["head_dim"]
    found: dict[str, Any] = {
        "num_hidden_layers": layers - keys.count("nextn_predict_layers"),
        "linear_num_key_heads": values if tiled else keys_stored,
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "full_attention_interval": keys.integer("full_attention_interval", 4),
        "partial_rotary_factor": rotated / head_dim,
        "attention_bias": False,
    }
    if tiled:
        found["linear_stored_key_heads"] = keys_stored
    sections = keys.numbers("rope.dimension_sections")
    if sections:
        found["mrope_section"] = [part for part in sections if part]
    if keys.architecture == "qwen35":
        return found
    found["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    return found | _experts(keys)


def _experts(keys: Keys) -> dict[str, Any]:
    """Mixtures in every layer. The format cannot say that weights are not normalised: the architecture's always are."""
    if keys.integer("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise keys.bad("expert_gating_func", keys.integer("expert_gating_func"), "1, the softmax,")
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(keys: Keys, common: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    """Windows of attention. The format says neither how scores are scaled nor, in older files, which layers are full ones.

    llama.cpp knows the one model whose scores are not scaled by its head size by its 62 layers.
    """
    layers = common["num_hidden_layers"]
    scalar = common["hidden_size"] // common["num_attention_heads"] if layers == _GEMMA_27B else common["head_dim"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
        "rope_theta": keys.real("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": scalar,
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3next": Architecture("qwen3_next", "Qwen3NextForCausalLM", _hybrid, partial=True, sparse=True),
    "qwen35": Architecture("qwen3_5", "Qwen3_5ForConditionalGeneration", _hybrid, partial=True),
    "qwen35moe": Architecture("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _hybrid, partial=True, sparse=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma),
}
"""By the name in ``general.architecture``."""
