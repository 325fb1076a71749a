"""config.json in its many spellings."""

import json
from pathlib import Path
from typing import Any

import pytest

from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import CacheSpec, ModelSpec
from atlas_model_qwen.config import ATTENTION, CONVOLUTION, DELTA, FULL, LINEAR, TRAITS, QwenConfig, read_config

DENSE: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4,
    "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "eos_token_id": 7,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {
    "full_attention_interval": 4, "partial_rotary_factor": 0.25, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "qwen2": {**DENSE, "head_dim": None}, "qwen3": DENSE, "qwen3_vl": DENSE,
    "qwen3_moe": {**DENSE, **EXPERTS}, "qwen3_vl_moe": {**DENSE, **EXPERTS},
    "qwen3_next": {**DENSE, **EXPERTS, **HYBRID, "shared_expert_intermediate_size": 48},
    "qwen3_5": {**DENSE, **HYBRID},
    "qwen3_5_moe": {**DENSE, **EXPERTS, **HYBRID, "shared_expert_intermediate_size": 48, "intermediate_size": None},
}  # fmt: skip


def read(model_type: str = "qwen3", **changes: Any) -> ModelSpec:
    return read_config({**BASES[model_type], "model_type": model_type, **changes}, model_type)


def family(spec: ModelSpec) -> QwenConfig:
    assert isinstance(spec.family, QwenConfig)
    return spec.family


def test_every_type_has_a_base():
    assert set(BASES) == set(TRAITS)
    for model_type in BASES:
        assert read(model_type).model_type == model_type


def test_qwen2_derives_its_heads_and_has_biases_on_three_of_four():
    found = family(read("qwen2"))
    assert (found.head_dim, found.qkv_bias, found.o_bias, found.traits.qk_norm) == (16, True, False, False)
    assert family(read("qwen2", attention_bias=True)) == found


def test_qwen3_names_its_heads_and_may_have_all_biases():
    with pytest.raises(CheckpointError, match="head_dim"):
        read(head_dim=None)
    found = family(read(attention_bias=True))
    assert (found.qkv_bias, found.o_bias) == (True, True)


def test_layers_of_two_kinds_from_either_spelling():
    kinds = (LINEAR, LINEAR, LINEAR, FULL)
    by_interval = read("qwen3_5")
    by_list = read("qwen3_5", full_attention_interval=None, layer_types=list(kinds))
    assert family(by_interval).kinds == kinds
    assert by_list == by_interval == read("qwen3_5", layer_types=list(kinds))
    other = (FULL, LINEAR, LINEAR, FULL)
    assert family(read("qwen3_5", full_attention_interval=None, layer_types=list(other))).kinds == other


def test_states_and_pages_are_cache_groups():
    assert read("qwen3_5").caches == (
        CacheSpec(ATTENTION, "full", 1, 2, 32),
        CacheSpec(CONVOLUTION, "recurrent", 3, state_shape=(3, 2 * 2 * 16 + 4 * 8)),
        CacheSpec(DELTA, "recurrent", 3, state_shape=(4, 16, 8)),
    )
    assert read("qwen3").caches == (CacheSpec(ATTENTION, "full", 4, 2, 32),)


def test_a_quarter_of_a_head_turns():
    assert family(read("qwen3_5")).rotated == 8
    inside = {"rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    spec = read(
        "qwen3_5", rope_theta=None, partial_rotary_factor=None, rope_parameters={**inside, "mrope_interleaved": True}
    )
    assert spec == read("qwen3_5")


def test_text_config_is_the_model_and_the_outer_file_ties_the_head():
    inner = {**BASES["qwen3_vl"], "model_type": "qwen3_vl_text", "tie_word_embeddings": True}
    outer = {"model_type": "qwen3_vl", "text_config": inner, "vision_config": {"depth": 3}, "image_token_id": 500}
    assert read_config({**outer, "tie_word_embeddings": False}, "qwen3_vl") == read("qwen3_vl")
    assert read_config(outer, "qwen3_vl").tied_embeddings


def test_experts_in_some_layers():
    found = family(read("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2)).experts
    assert found is not None
    assert (found.layers, found.normalise, found.shared) == ({3}, False, 0)
    named = family(read("qwen3_moe", num_experts=None, num_local_experts=8, norm_topk_prob=True)).experts
    assert named is not None
    assert (named.count, named.normalise, named.layers) == (8, True, {0, 1, 2, 3})
    shared = family(read("qwen3_5_moe")).experts
    assert shared is not None
    assert (shared.shared, shared.normalise) == (48, True)


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ("qwen3", {"qkv_bias": True}, "qkv_bias"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ("qwen3", {"mystery_scale": 2}, "mystery_scale"),
        ("qwen3", {"torch_dtype": "float8"}, "torch_dtype"),
        ("qwen3", {"rope_scaling": {"rope_type": "never_seen"}}, "never_seen"),
        ("qwen3", {"rope_theta": None}, "rope_theta"),
        ("qwen3", {"head_dim": 31}, "head_dim"),
        ("qwen3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ("qwen3", {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ("qwen3_5", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen3_5", {"mrope_section": [2, 1, 2]}, "mrope_section"),
        ("qwen3_5", {"mrope_section": [2.0]}, "mrope_section"),
        ("qwen3_5", {"full_attention_interval": None}, "full_attention_interval"),
        ("qwen3_5", {"full_attention_interval": 0}, "full_attention_interval"),
        ("qwen3_5", {"layer_types": [FULL] * 4}, "layer_types"),
        ("qwen3_5", {"layer_types": [FULL], "full_attention_interval": None}, "layer_types"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3_5", {"linear_stored_key_heads": 3}, "linear_stored_key_heads"),
        ("qwen3_5", {"linear_key_head_dim": None}, "linear_key_head_dim"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type"),
        ("qwen3_5", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts"),
        ("qwen3_moe", {"num_experts": None}, "num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen3_next", {"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_wrong_is_named(model_type, changes, named):
    with pytest.raises(CheckpointError, match=named):
        read(model_type, **changes)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "rms_norm_eps", "vocab_size", "intermediate_size"]
)
def test_missing_keys_are_named(key):
    with pytest.raises(CheckpointError, match=key):
        read(**{key: None})


def test_tiny_checkpoints_are_read():
    data = Path(__file__).parents[2] / "tests/data/tiny"
    found = [name for name in TRAITS if (data / name).is_dir()]
    assert found
    for name in found:
        spec = read_config(json.loads((data / name / "config.json").read_text()), name)
        assert (spec.hidden_size, spec.vocab_size) == (64, 512)


REAL = {
    "Qwen3-0.6B": (28, 151936, 1024), "Qwen3-8B": (36, 151936, 4096), "Qwen3-30B-A3B": (48, 151936, 2048),
    "Qwen3-Coder-480B-A35B-Instruct": (62, 151936, 6144), "Qwen3-Next-80B-A3B-Instruct": (48, 151936, 2048),
    "Qwen3-VL-30B-A3B-Instruct": (48, 151936, 2048), "Qwen3.5-27B": (64, 248320, 5120),
    "Qwen3.5-35B-A3B": (40, 248320, 2048), "Qwen3.6-27B": (64, 248320, 5120), "Qwen3.6-35B-A3B-FP8": (40, 248320, 2048),
    "Qwen3.6-35B-A3B-NVFP4": (40, 248320, 2048),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_configurations_of_real_models_are_read(shared, name):
    given = json.loads((shared / "assets" / "configs" / f"{name}.json").read_text())
    spec = read_config(given, given["model_type"])
    assert (spec.layers, spec.vocab_size, spec.hidden_size) == REAL[name]
    assert sum(cache.layers for cache in spec.caches if cache.group != CONVOLUTION) == spec.layers
