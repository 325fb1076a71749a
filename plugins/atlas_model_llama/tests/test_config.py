"""config.json in its many spellings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_core.loading.presets import choose_preset, read_presets
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.model import ModelSpec
from atlas_model_llama.config import LlamaConfig, read_config
from atlas_model_llama.weights import name_map, row_order

BASE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128,
    "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
}  # fmt: skip


def read(without: tuple[str, ...] = (), model_type: str = "llama", **changes: Any) -> ModelSpec:
    return read_config({k: v for k, v in {**BASE, **changes}.items() if k not in without}, model_type)


def family(spec: ModelSpec) -> LlamaConfig:
    assert isinstance(spec.family, LlamaConfig)
    return spec.family


@pytest.mark.parametrize(
    "spec",
    [
        read(),
        read(rope_scaling=None),
        read(without=("rope_theta",), rope_parameters={"rope_theta": 1000000, "rope_type": "default"}),
        read(rope_parameters={"rope_theta": 1000000, "rope_type": "default"}),
        read_config({"architectures": ["X"], "model_type": "wrapper", "text_config": BASE}, "llama"),
    ],
)
def test_every_spelling_of_theta_is_one_model(spec: ModelSpec) -> None:
    assert spec == read()
    assert family(spec).rope.theta == 1e6


def test_llama_without_theta_uses_the_families_own() -> None:
    assert family(read(without=("rope_theta",))).rope.theta == 10000.0


def test_mistral_without_theta_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no rope_theta"):
        read(without=("rope_theta",), model_type="mistral")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "never_seen"}}, "never_seen"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "beta"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"mystery_scale": 2}, "mystery_scale"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"text_config": {"hidden_size": 32}}, "hidden_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(**changes)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings"]
)
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        read(without=(key,))


def test_head_dim_may_differ_from_the_quotient() -> None:
    assert family(read(head_dim=32)).head_dim == 32
    assert family(read(head_dim=None)).head_dim == 16
    assert family(read(hidden_size=66, head_dim=16)).head_dim == 16


def test_key_heads_default_to_query_heads() -> None:
    assert family(read()).kv_heads == family(read(num_key_value_heads=None)).kv_heads == 4
    assert family(read(num_key_value_heads=2)).kv_heads == 2


def test_llama3_frequencies_keep_short_waves_and_stretch_long_ones() -> None:
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = family(read(head_dim=64, rope_scaling={**scaling, "original_max_position_embeddings": 64})).rope
    plain = family(read(head_dim=64)).rope
    got, want = rope.inv_freq(64), plain.inv_freq(64)
    turns = 64 * want / (2 * np.pi)
    np.testing.assert_array_equal(got[turns > 4], want[turns > 4])
    np.testing.assert_allclose(got[turns < 1], want[turns < 1] / 8, rtol=1e-6)
    middle = (turns > 1) & (turns < 4)
    assert middle.any()
    assert np.all(got[middle] < want[middle])
    assert np.all(got[middle] > want[middle] / 8)


def test_sliding_window_belongs_to_mistral_only() -> None:
    spec = read(model_type="mistral", sliding_window=8)
    assert (spec.caches[0].kind, spec.caches[0].window) == ("sliding", 8)
    assert read(model_type="mistral", sliding_window=None).caches[0].kind == "full"
    with pytest.raises(CheckpointError, match="sliding_window"):
        read(sliding_window=8)


def test_gguf_rows_of_q_and_k_are_put_back() -> None:
    """Head size 6, since with 4 the reorder is its own inverse and a wrong direction would pass."""
    spec = read(num_attention_heads=2, hidden_size=12)
    file_rows = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    order = row_order(spec, "q")
    assert order is not None
    np.testing.assert_array_equal(file_rows[list(order)], np.arange(12))
    assert row_order(read(num_attention_heads=2, num_key_value_heads=1, hidden_size=12), "k") == order[:6]
    assert row_order(spec, "v") is None


def test_biases_are_asked_for_and_moved_with_their_rows() -> None:
    weights = name_map("gguf", read(attention_bias=True, mlp_bias=True)).weights
    assert weights["layers.1.q.bias"].names == ("blk.1.attn_q.bias",)
    assert weights["layers.1.q.bias"].row_order == weights["layers.1.q"].row_order
    assert weights["layers.0.down.bias"].names == ("blk.0.ffn_down.bias",)
    assert "layers.0.q.bias" not in name_map("hf", read()).weights


def test_unknown_naming_is_refused() -> None:
    with pytest.raises(CheckpointError, match="onnx"):
        name_map("onnx", read())


def test_tiny_checkpoints_are_read() -> None:
    data = Path(__file__).parents[3] / "tests/data/tiny"
    for name, layers in (("llama", 3), ("mistral", 2)):
        assert read_config(json.loads((data / name / "config.json").read_text()), name).layers == layers


def test_the_smallest_models_are_kept_cool() -> None:
    presets = read_presets("atlas_model_llama")
    for path in ("/cache/models/b179/SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-1.7B-Instruct"):
        chosen = choose_preset(presets, "llama", 576, path).winner
        assert chosen is not None
        assert dict(chosen.sampling) == {"temperature": 0.2, "top_p": 0.9}
    assert choose_preset(presets, "llama", 4096, "meta-llama/Llama-3.1-8B-Instruct").winner is None
