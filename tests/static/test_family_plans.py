"""Families of which no machine has kernels of their own: every node has one all the same, for one token and for a whole prompt."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atlas_core.assembly.explain import explain
from atlas_core.plugins import Registry, discover
from atlas_core.settings import read_settings

MINIMAX = {
    "model_type": "minimax_m2", "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 4, "num_local_experts": 256, "num_experts_per_tok": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 196608, "rope_theta": 5000000, "rotary_dim": 64,
    "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "qk_norm_type": "per_layer",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 200064, "eos_token_id": 200020,
}  # fmt: skip
"""MiniMax-M2, four of its 62 layers."""

IN_FP8 = {
    "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "lm_head", *(f"model.layers.{i}.self_attn" for i in range(4))],
}  # fmt: skip
IN_NVFP4 = {
    "quant_method": "modelopt", "ignore": ["lm_head", "*.self_attn*", "*.block_sparse_moe.gate"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
}  # fmt: skip
"""Statements of its FP8 and NVFP4 checkpoints, in short, with attention in bfloat16 as the latter have it."""

GEMMA = {
    "model_type": "gemma3_text", "head_dim": 256, "hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4,
    "num_key_value_heads": 1, "num_hidden_layers": 18, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "sliding_window": 512,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "torch_dtype": "bfloat16",
    "vocab_size": 262144, "eos_token_id": 1,
}  # fmt: skip
"""Gemma 3 270M."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return discover()


def explained(registry: Registry, config: dict[str, Any], folder: Path, hardware: str) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    flags = {"model": str(folder), "hardware": hardware, "load_format": "dummy"}
    return dict(explain(registry, read_settings(flags, {})))


@pytest.mark.parametrize("hardware", ["hopper", "gb10", "cpu"])
def test_minimax(registry: Registry, tmp_path: Path, hardware: str) -> None:
    for bucket in explained(registry, MINIMAX, tmp_path, hardware)["buckets"]:
        steps = bucket["segments"][0]["steps"]
        covered = Counter(op for step in steps for op in step["replaces"])
        # Of a layer: two norms of the stream, one of queries, one of keys; four products and the router's.
        assert (covered["rms_norm"], covered["linear"]) == (4 * 4 + 1, 4 * 5 + 1)
        assert covered["moe_route_sigmoid"] == covered["moe_experts"] == covered["paged_attention"] == 4
        (shape,) = {tuple(step["operands"]["weights"]["shape"]) for step in steps if step["op"] == "moe_route_sigmoid"}
        assert shape == (bucket["tokens"], 8)


@pytest.mark.parametrize("hardware", ["hopper", "gb10"])
@pytest.mark.parametrize(
    ("stated", "packing"), [(IN_FP8, "expert_rows_e4m3"), (IN_NVFP4, "expert_rows_e2m1")], ids=["fp8", "nvfp4"]
)
def test_experts_are_read_as_stored(
    registry: Registry, tmp_path: Path, hardware: str, stated: dict[str, Any], packing: str
) -> None:
    """Without --transcode, and for any number of tokens: beside them are matrices in bfloat16."""
    found = explained(registry, MINIMAX | {"quantization_config": stated}, tmp_path, hardware)
    names = set()
    for bucket in found["buckets"]:
        steps = [step for step in bucket["segments"][0]["steps"] if "moe_experts" in step["replaces"]]
        assert len(steps) == 4
        for step in steps:
            names.add(step["implementation"])
            assert {step["packings"][name] for name in ("gate", "up", "down")} == {packing}
    assert len(names) > 1
    assert all("_coded_" in name for name in names)


@pytest.mark.parametrize("hardware", ["hopper", "gb10"])
def test_a_router_in_float32_has_a_kernel(registry: Registry, hardware: str) -> None:
    """As MiniMax M2 has them, beside matrices in FP8."""
    folder = Path(__file__).parents[1] / "data" / "tiny" / "q_fp8_block_minimax"
    found = dict(explain(registry, read_settings({"model": str(folder), "hardware": hardware}, {})))
    for bucket in found["buckets"]:
        steps = bucket["segments"][0]["steps"]
        packings = [step["packings"].get("weight") for step in steps if step["op"] == "linear"]
        assert packings.count("f32_as_bf16_pair") == sum(step["op"] == "moe_route_sigmoid" for step in steps) > 0


@pytest.mark.parametrize("hardware", ["hopper", "gb10", "cpu"])
def test_gemma(registry: Registry, tmp_path: Path, hardware: str) -> None:
    found = explained(registry, GEMMA, tmp_path, hardware)
    assert [*found["caches"]] == ["cache.sliding_attention", "cache.full_attention"]
    for bucket in found["buckets"]:
        covered = Counter(op for step in bucket["segments"][0]["steps"] for op in step["replaces"])
        assert (covered["rms_norm"], covered["head_rms_norm"], covered["linear"]) == (18 * 4 + 1, 18 * 2, 18 * 7 + 1)
        assert covered["gelu_mul"] == covered["paged_attention"] == 18
