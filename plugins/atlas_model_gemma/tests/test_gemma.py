"""Configurations of Gemma 3 as they are published, and where its weights lie."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_core.loading.presets import choose_preset, read_presets
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import ModelSpec
from atlas_model_gemma.config import FULL, SLIDING, GemmaConfig, read_config
from atlas_model_gemma.weights import name_map

TINY = Path(__file__).parents[3] / "tests" / "data" / "tiny" / "gemma3"
SMALL = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None, "bos_token_id": 2,
    "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640, "intermediate_size": 2048, "layer_types": ([SLIDING] * 5 + [FULL]) * 3,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18,
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
    "torch_dtype": "bfloat16", "use_bidirectional_attention": False, "use_cache": True, "vocab_size": 262144,
    "_sliding_window_pattern": 6,
}  # fmt: skip
"""Gemma 3 270M."""
PICTURES = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {
        "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text", "num_hidden_layers": 62, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
}  # fmt: skip
"""In the shape of Gemma 3 27B's."""


def read(given: dict[str, Any] = SMALL, **changes: Any) -> ModelSpec:
    merged = {**given, **changes}
    return read_config({key: value for key, value in merged.items() if value is not ...}, "gemma3")


def family(spec: ModelSpec) -> GemmaConfig:
    assert isinstance(spec.family, GemmaConfig)
    return spec.family


def test_the_small_model() -> None:
    spec = read()
    assert (spec.hidden_size, spec.layers, spec.dtype, spec.tied_embeddings) == (640, 18, DType.BF16, True)
    assert [(cache.group, cache.kind, cache.layers, cache.window) for cache in spec.caches] == [
        (SLIDING, "sliding", 15, 512),
        (FULL, "full", 3, None),
    ]
    found = family(spec)
    assert found.scale == 1 / 16
    assert (found.ropes[SLIDING].theta, found.ropes[FULL].theta) == (1e4, 1e6)


def test_the_text_model_of_one_that_sees_pictures() -> None:
    spec = read(PICTURES)
    assert (spec.vocab_size, spec.max_position, spec.eos_token_ids) == (262208, 131072, (1, 106))
    assert [cache.layers for cache in spec.caches] == [52, 10]
    found = family(spec)
    assert found.scale == pytest.approx(168**-0.5)
    # Only full layers are stretched.
    np.testing.assert_allclose(found.ropes[FULL].inv_freq(128)[-1], 1e6 ** (-126 / 128) / 8, rtol=1e-6)
    np.testing.assert_allclose(found.ropes[SLIDING].inv_freq(128)[-1], 1e4 ** (-126 / 128), rtol=1e-6)


def test_both_spellings_of_the_tiny_checkpoint() -> None:
    old, new = (json.loads((TINY / name).read_text()) for name in ("config.json", "config.v5.json"))
    assert read_config(old, "gemma3") == read_config(new, "gemma3")


def test_layers_follow_from_the_pattern_where_they_are_not_listed() -> None:
    assert read(layer_types=...) == read()
    assert family(read(layer_types=..., _sliding_window_pattern=3)).kinds == (SLIDING, SLIDING, FULL) * 6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": [SLIDING] * 17}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 18}, "layer_types"),
        ({"sliding_window": ...}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e6}}}, "rope_parameters"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"mystery_scale": 2}, "mystery_scale"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(**changes)


def test_norms_count_from_one_and_those_behind_a_part_are_divided() -> None:
    weights = name_map("hf", read()).weights
    before, after = weights["layers.0.attention_norm"], weights["layers.0.attended_norm"]
    assert (before.offset, before.factor, after.offset, after.factor) == (1.0, 1.0, 1.0, 640**-0.5)
    assert after.names[0] == "model.layers.0.post_attention_layernorm.weight"
    stored = name_map("gguf", read()).weights["layers.17.inner_norm"]
    assert (stored.names, stored.offset, stored.factor) == (("blk.17.post_ffw_norm.weight",), 0.0, 640**-0.5)


def test_unknown_naming_is_refused() -> None:
    with pytest.raises(CheckpointError, match="onnx"):
        name_map("onnx", read())


def test_what_generation_config_of_the_models_says() -> None:
    chosen = choose_preset(read_presets("atlas_model_gemma"), "gemma3", 640, "google/gemma-3-270m-it").winner
    assert chosen is not None
    assert dict(chosen.sampling) == {"temperature": 1.0, "top_p": 0.95, "top_k": 64}
