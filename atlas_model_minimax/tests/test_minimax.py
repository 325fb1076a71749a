"""Configurations of MiniMax M2 as they are published, and where its weights lie."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_core.loading.presets import choose_preset, read_presets
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import ModelSpec
from atlas_model_minimax.config import MiniMaxConfig, read_config
from atlas_model_minimax.weights import name_map

TINY = Path(__file__).parents[2] / "tests" / "data" / "tiny" / "minimax_m2"
PUBLISHED = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "dtype": "bfloat16", "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 204800,
    "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_cache": True, "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
"""MiniMax-M2.7, without its quantisation."""


def read(**changes: Any) -> ModelSpec:
    given = {**PUBLISHED, **changes}
    return read_config({key: value for key, value in given.items() if value is not ...}, "minimax_m2")


def family(spec: ModelSpec) -> MiniMaxConfig:
    assert isinstance(spec.family, MiniMaxConfig)
    return spec.family


def test_the_published_model() -> None:
    spec = read()
    assert (spec.hidden_size, spec.layers, spec.dtype, spec.max_position) == (3072, 62, DType.BF16, 204800)
    found = family(spec)
    assert (found.heads, found.kv_heads, found.experts, found.active, found.expert_size) == (48, 8, 256, 8, 1536)
    assert [(cache.kind, cache.layers, cache.kv_heads, cache.head_dim) for cache in spec.caches] == [
        ("full", 62, 8, 128)
    ]
    # Half of a head turns: 32 pairs, the slowest once in 2π · 5e6^(62/64) positions.
    slow = found.rope.inv_freq(found.rope.rotated(found.head_dim))
    assert slow.shape == (32,)
    np.testing.assert_allclose(slow[-1], 5e6 ** (-62 / 64), rtol=1e-6)


@pytest.mark.parametrize(
    "rotary",
    [
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5, "rotary_dim": ...},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5000000, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)  # fmt: skip
def test_the_rotated_part_in_every_spelling(rotary: dict[str, Any]) -> None:
    assert read(**rotary) == read()


def test_both_spellings_of_the_tiny_checkpoint() -> None:
    old, new = (json.loads((TINY / name).read_text()) for name in ("config.json", "config.v5.json"))
    assert read_config(old, "minimax_m2") == read_config(new, "minimax_m2")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"use_routing_bias": False}, "use_routing_bias"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ({"attn_type_list": [1, 0] * 31}, "attn_type_list"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"rotary_dim": 63}, "partial_rotary_factor"),
        ({"rotary_dim": 256}, "partial_rotary_factor"),
        ({"rotary_dim": 32, "partial_rotary_factor": 0.5}, "rotary_dim"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"head_dim": ...}, "head_dim"),
        ({"mystery_scale": 2}, "mystery_scale"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(**changes)


def test_every_expert_has_its_own_tensors() -> None:
    weights = name_map("hf", read()).weights
    stack = weights["layers.61.experts.up"].stack
    assert stack is not None
    assert stack.separate[0][255] == "model.layers.61.block_sparse_moe.experts.255.w3.weight"
    assert weights["layers.3.router.bias"].names == ("model.layers.3.block_sparse_moe.e_score_correction_bias",)
    assert len(weights) == 3 + 62 * 13


def test_unknown_naming_is_refused() -> None:
    with pytest.raises(CheckpointError, match="gguf"):
        name_map("gguf", read())


def test_what_the_model_cards_advise() -> None:
    chosen = choose_preset(read_presets("atlas_model_minimax"), "minimax_m2", 3072, "MiniMaxAI/MiniMax-M2.7").winner
    assert chosen is not None
    assert dict(chosen.sampling) == {"temperature": 1.0, "top_p": 0.95, "top_k": 40}
