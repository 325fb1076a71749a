"""Where weights lie: fused projections taken apart, experts, biases, what is kept aside."""

from typing import Any

import numpy as np
import pytest

from atlas_core.contracts.model import NameMap
from atlas_core.vocab.errors import CheckpointError
from atlas_model_qwen.config import read_config
from atlas_model_qwen.weights import name_map

BASE: dict[str, Any] = {
    "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 2,
    "intermediate_size": 8, "vocab_size": 16, "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7,
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 4,
    "linear_value_head_dim": 3, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
LINEAR = (*(key for key in BASE if key.startswith("linear_")), "full_attention_interval")


def names(model_type: str, naming: str = "hf", without: tuple[str, ...] = (), **changes: Any) -> NameMap:
    config = {key: value for key, value in BASE.items() if key not in without}
    return name_map(naming, read_config({**config, "model_type": model_type, **changes}, model_type))


def rows(weights: NameMap, name: str) -> list[int]:
    order = weights.weights[name].row_order
    assert order is not None
    return list(order)


def test_queries_and_their_gates_lie_head_by_head():
    weights = names("qwen3_5", without=EXPERTS)
    stored = np.arange(24).reshape(2, 2, 6)  # head, query or gate, dimension
    assert rows(weights, "layers.1.q") == stored[:, 0].reshape(-1).tolist()
    assert rows(weights, "layers.1.q_gate") == stored[:, 1].reshape(-1).tolist()
    assert weights.weights["layers.1.q"].names == weights.weights["layers.1.q_gate"].names


def test_projections_fused_by_key_head_are_taken_apart():
    weights = names("qwen3_next")
    groups = [np.split(np.arange(26) + 26 * head, [4, 8, 17]) for head in range(2)]  # query, key, values, gates
    q, k, v, z = (np.concatenate(part).tolist() for part in zip(*groups, strict=True))
    assert rows(weights, "layers.0.linear.qkv") == [*q, *k, *v]
    assert rows(weights, "layers.0.linear.z") == z
    assert rows(weights, "layers.0.linear.b") == [0, 1, 2, 6, 7, 8]
    assert rows(weights, "layers.0.linear.a") == [3, 4, 5, 9, 10, 11]


def test_separate_projections_are_taken_whole():
    weights = names("qwen3_5_moe").weights
    for part, tensor in (("qkv", "qkv"), ("z", "z"), ("a", "a"), ("b", "b")):
        source = weights[f"layers.0.linear.{part}"]
        assert source.row_order is None
        assert source.names[0] == f"model.language_model.layers.0.linear_attn.in_proj_{tensor}.weight"
        assert source.names[1] == f"model.layers.0.linear_attn.in_proj_{tensor}.weight"


def test_experts_are_stacks_of_either_kind():
    stack = names("qwen3_5_moe").weights["layers.1.experts.up"].stack
    assert stack is not None
    assert stack.fused[0] == "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert (stack.fused_rows, stack.part) == (10, (5, 10))
    assert stack.separate[1] == tuple(f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(3))
    down = names("qwen3_moe", without=(*LINEAR, EXPERTS[-1])).weights["layers.1.experts.down"].stack
    assert down is not None
    assert (down.fused, down.fused_rows, down.part) == (("model.layers.1.mlp.experts.down_proj",), 12, (0, 12))


def test_norms_of_hybrids_count_from_one_but_for_that_of_linear_attention():
    weights = names("qwen3_next").weights
    centred = {name for name, source in weights.items() if source.offset}
    assert {weights[name].offset for name in centred} == {1.0}
    assert centred == {
        "final_norm", "layers.1.q_norm", "layers.1.k_norm",
        *(f"layers.{layer}.{norm}" for layer in range(2) for norm in ("attention_norm", "mlp_norm")),
    }  # fmt: skip
    plain = names("qwen3", without=(*EXPERTS, *LINEAR)).weights
    assert {source.offset for source in plain.values()} == {0.0}


def test_drafting_layers_and_pictures_are_kept_aside():
    assert set(names("qwen3_5", without=EXPERTS).ignored) >= {"mtp.*", "model.visual.*"}


def test_dense_models_in_gguf():
    weights = names("qwen2", "gguf", (*EXPERTS, *LINEAR)).weights
    assert weights["layers.1.q.bias"].names == ("blk.1.attn_q.bias",)
    assert weights["layers.1.q"].row_order is None
    assert "layers.1.o.bias" not in weights
    assert "layers.1.q_norm" not in weights
    assert names("qwen3", "gguf", (*EXPERTS, *LINEAR)).weights["layers.0.k_norm"].names == ("blk.0.attn_k_norm.weight",)


@pytest.mark.parametrize(("model_type", "naming"), [("qwen3_vl", "gguf"), ("qwen3", "onnx")])
def test_unknown_namings_are_refused(model_type, naming):
    with pytest.raises(CheckpointError, match=naming):
        names(model_type, naming, (*EXPERTS, *LINEAR))
