"""FP8 and NVFP4 checkpoints of dense models are served as they are stored: every product of a layer has a kernel, for a token and for a prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_qwen_plan import MACHINES, bound, plan_of

from atlas_core.assembly.explain import explain
from atlas_core.plugins import Registry, discover
from atlas_core.settings import read_settings

DENSE = {
    "model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 151936, "eos_token_id": 151645,
}  # fmt: skip
LLAMA = {**DENSE, "model_type": "llama", "intermediate_size": 14336}
STATED: dict[str, tuple[str, dict[str, Any]]] = {
    "e4m3_tile": ("e4m3_units", {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"],
    }),
    "e4m3_row": ("e4m3_units", {
        "quant_method": "compressed-tensors", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    }),
    "nvfp4": ("nvfp4_units", {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    }),
}  # fmt: skip
"""By layout: what it is packed as, and what a config says."""
MATRICES = 7 * 2  # of the layers


@pytest.fixture(scope="module")
def registry() -> Registry:
    return discover()


@pytest.mark.parametrize("hardware", ["hopper", "gb10"])
@pytest.mark.parametrize("layout", STATED)
@pytest.mark.parametrize("config", [DENSE, LLAMA], ids=lambda config: str(config["model_type"]))
def test_no_matrix_is_decoded(
    registry: Registry, tmp_path: Path, config: dict[str, Any], layout: str, hardware: str
) -> None:
    packing, stated = STATED[layout]
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    flags = {"model": str(tmp_path), "hardware": hardware, "load_format": "dummy"}
    found = dict(explain(registry, read_settings(flags, {})))
    for bucket in found["buckets"]:
        steps = bucket["segments"][0]["steps"]
        read = [
            (step["implementation"], step["packings"][name])
            for step in steps
            for name, operand in step["operands"].items()
            if operand["type"] == layout
        ]
        assert len(read) == MATRICES
        assert {packed for _, packed in read} == {packing}
        assert all("scaled" in name for name, _ in read)


@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize("layout", STATED)
def test_every_launch_is_declared_and_fits_the_machine(tmp_path: Path, layout: str, hardware: str) -> None:
    config = {**DENSE, "quantization_config": STATED[layout][1]}
    plan, backend = plan_of(config, hardware, tmp_path)
    for bucket in plan.buckets:
        for step in bucket.segments[0].steps:
            assert {(launch.module, launch.entry) for launch in bound(step, backend)} <= set(
                step.implementation.kernels
            )
