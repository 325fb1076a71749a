"""Mixtures of experts and hybrids in GGUF files: weights and goldens of the tiny checkpoints, written as llama.cpp's conversions do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_file import gguf, stored

from atlas_core.engine.forced import forced_logits
from atlas_core.vocab.errors import CheckpointError

TINY = Path(__file__).parents[1] / "data" / "tiny" / "qwen3_vl_moe"
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    """The text model under the names of GGUF; gate and up lie apart there."""
    found, text = stored(TINY), "model.language_model."
    result = {
        "token_embd.weight": found[f"{text}embed_tokens.weight"], "output_norm.weight": found[f"{text}norm.weight"],
        "output.weight": found["lm_head.weight"],
    }  # fmt: skip
    for layer in range(3):
        ours, theirs = f"{text}layers.{layer}.", f"blk.{layer}."
        result |= {f"{theirs}{name}.weight": found[f"{ours}{part}.weight"] for part, name in PARTS.items()}
        fused = found[f"{ours}mlp.experts.gate_up_proj"]
        gate, up = np.split(fused, 2, axis=1)
        down = found[f"{ours}mlp.experts.down_proj"]
        for name, stack in (("gate", gate), ("up", up), ("down", down)):
            result[f"{theirs}ffn_{name}_exps.weight"] = np.ascontiguousarray(stack)
    return result


def metadata() -> dict[str, Any]:
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = {
        **tokenizer["model"]["vocab"],
        **{added["content"]: added["id"] for added in tokenizer["added_tokens"]},
    }
    special = {added["content"] for added in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    numbers = {
        "block_count": 3, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.value_length": 32, "rope.freq_base": 5e6, "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "vocab_size": 512,
    }  # fmt: skip
    return {
        "general.architecture": "qwen3moe", **{f"qwen3moe.{key}": value for key, value in numbers.items()},
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 498,
    }  # fmt: skip


def test_experts_of_a_gguf_file(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(metadata(), tensors()))
    built = make(file, max_batch_size=64)
    assert built.model.spec.model_type == "qwen3_moe"
    with np.load(TINY / "golden.npz") as golden:
        tokens = np.concatenate([golden["input_ids"], golden["gen_ids"]])
        want = np.concatenate([golden["prefill_logits"], golden["step_logits"][1:]])
    (logits,) = forced_logits(built.runner, built.limits, [tokens.tolist()], chunk=64)
    assert np.abs(logits[: len(want)] - want).max() <= 2e-4


def test_a_choice_by_sigmoid_is_another_architecture(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf({**metadata(), "qwen3moe.expert_gating_func": 2}, tensors()))
    with pytest.raises(CheckpointError, match="expert_gating_func is 2"):
        make(file)


HYBRIDS = {"qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
KEYS, VALUES, DIM = 2, 4, 16
"""Key and value heads of linear attention, and their size."""
LINEAR = {
    "A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight", "conv1d.weight": "ssm_conv1d.weight",
    "out_proj.weight": "ssm_out.weight", "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight", "in_proj_b.weight": "ssm_beta.weight", "in_proj_ba.weight": "ssm_ba.weight",
}  # fmt: skip
OTHERS = {
    **PARTS, "post_attention_layernorm": "post_attention_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


def tiled(array: np.ndarray, axis: int = 0, size: int = 1, start: int = 0) -> np.ndarray:
    """Value heads of ``size`` elements each, from ``start`` on: the first of every key head, then the second of every one."""
    head, tail = np.split(array, [start], axis=axis)
    parts = np.split(tail, VALUES, axis=axis)
    assert parts[0].shape[axis] == size
    shared = VALUES // KEYS
    return np.concatenate([head, *(parts[key * shared + i] for i in range(shared) for key in range(KEYS))], axis=axis)


def converted(family: str, part: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """One tensor of a layer of linear attention, by the names of GGUF."""
    if part == "in_proj_qkvz.weight":
        groups = array.reshape(KEYS, -1, array.shape[-1])
        shared = VALUES // KEYS * DIM
        q, k, v, z = np.split(groups, np.cumsum([DIM, DIM, shared]), axis=1)
        width = array.shape[-1]
        return {
            "attn_qkv.weight": np.concatenate([x.reshape(-1, width) for x in (q, k, v)]), "attn_gate.weight": z.reshape(-1, width),
        }  # fmt: skip
    if part == "A_log":
        array = -np.exp(array)
    if part == "conv1d.weight":
        array = array[:, 0]
    if family != "qwen3_next":
        keys = {"start": 2 * KEYS * DIM, "size": DIM}
        arranged: dict[str, dict[str, int]] = {
            "A_log": {}, "dt_bias": {}, "in_proj_a.weight": {}, "in_proj_b.weight": {}, "in_proj_z.weight": {"size": DIM},
            "in_proj_qkv.weight": keys, "conv1d.weight": keys, "out_proj.weight": {"axis": 1, "size": DIM},
        }  # fmt: skip
        array = tiled(array, **arranged[part]) if part in arranged else array
    return {LINEAR[part]: np.ascontiguousarray(array)}


def hybrid(family: str) -> dict[str, np.ndarray]:
    """The text model of a tiny hybrid, its norms as they are used; drafting layers behind."""
    result: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, array in stored(TINY.parent / family).items():
        name = name.replace("model.language_model.", "model.")  # noqa: PLW2901 -- both spellings
        if name.startswith(("mtp.", "model.visual")):
            continue
        if name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + 1  # noqa: PLW2901 -- stored less one
        if not name.startswith("model.layers."):
            renamed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            result[renamed[name.removesuffix(".weight")] + ".weight"] = array
            continue
        _, _, layer, part = name.split(".", 3)
        stem = f"blk.{layer}."
        if part.startswith("linear_attn."):
            made = converted(family, part.removeprefix("linear_attn."), array)
            result |= {stem + key: value for key, value in made.items()}
        elif part == "mlp.experts.gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            result |= {
                f"{stem}ffn_gate_exps.weight": np.ascontiguousarray(gate),
                f"{stem}ffn_up_exps.weight": np.ascontiguousarray(up),
            }
        elif part == "mlp.experts.down_proj":
            result[f"{stem}ffn_down_exps.weight"] = array
        elif part.startswith("mlp.experts."):
            kind = part.split(".")[3].removesuffix("_proj")
            experts.setdefault(f"{stem}ffn_{kind}_exps.weight", []).append(array)
        elif part == "mlp.shared_expert_gate.weight":
            result[f"{stem}ffn_gate_inp_shexp.weight"] = array[
                0
            ]  # tools that quantise leave an outer extent of one out
        else:
            result[stem + OTHERS[part.removesuffix(".weight")] + ".weight"] = array
    result |= {name: np.stack(parts) for name, parts in experts.items()}
    return result | {"blk.4.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}


def hybrid_metadata(family: str) -> dict[str, Any]:
    config = json.loads((TINY.parent / family / "config.json").read_text())
    config = config.get("text_config", config)
    architecture = HYBRIDS[family]
    numbers = {
        "block_count": 5, "nextn_predict_layers": 1, "context_length": 512, "embedding_length": 64,
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "rope.freq_base": float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": config["head_dim"] // 4, "attention.layer_norm_rms_epsilon": 1e-6,
        "ssm.conv_kernel": 4, "ssm.state_size": DIM, "ssm.group_count": KEYS, "ssm.time_step_rank": VALUES,
        "ssm.inner_size": VALUES * DIM, "full_attention_interval": 4, "vocab_size": 512,
    }  # fmt: skip
    if family == "qwen3_5":
        numbers["feed_forward_length"] = config["intermediate_size"]
    else:
        numbers |= {
            "expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }  # fmt: skip
    if family != "qwen3_next":
        numbers["rope.dimension_sections"] = [2, 1, 1, 0]
    return {
        **{key: value for key, value in metadata().items() if not key.startswith("qwen3moe.")},
        "general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in numbers.items()},
    }  # fmt: skip


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_of_gguf_files(make: Any, tmp_path: Path, family: str) -> None:
    file = tmp_path / "model.gguf"
    values, arrays = hybrid_metadata(family), hybrid(family)
    if family == "qwen3_next":  # one without a drafting layer
        values |= {"qwen3next.block_count": 4, "qwen3next.nextn_predict_layers": 0}
        del arrays["blk.4.nextn.eh_proj.weight"]
    file.write_bytes(gguf(values, arrays))
    built = make(file, max_batch_size=64)
    assert (built.model.spec.model_type, built.model.spec.layers) == (family, 4)
    with np.load(TINY.parent / family / "golden.npz") as golden:
        tokens = np.concatenate([golden["input_ids"], golden["gen_ids"]])
        want = np.concatenate([golden["prefill_logits"], golden["step_logits"][1:]])
        long_ids, last = golden["long_ids"].tolist(), golden["long_last_logits"]
    (logits,) = forced_logits(built.runner, built.limits, [tokens.tolist()], chunk=64)
    assert np.abs(logits[: len(want)] - want).max() <= 2e-4
    (long,) = forced_logits(built.runner, built.limits, [long_ids], chunk=64)
    assert np.abs(long[-1] - last).max() <= 2e-4


def test_decays_that_grow_are_refused(make: Any, tmp_path: Path) -> None:
    file, arrays = tmp_path / "model.gguf", hybrid("qwen3_5")
    arrays["blk.1.ssm_a"] = -arrays["blk.1.ssm_a"]
    file.write_bytes(gguf(hybrid_metadata("qwen3_5"), arrays))
    with pytest.raises(CheckpointError, match=r"blk\.1\.ssm_a has elements that are not below zero"):
        make(file)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ssm.inner_size": 66}, "ssm.inner_size"),
        ({"ssm.time_step_rank": 3}, "ssm.inner_size"),
        ({"rope.dimension_sections": [2, 1, 2, 0]}, "mrope_section"),
        ({"rope.dimension_count": 9}, "partial_rotary_factor"),
        ({"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms"),
    ],
)
def test_hybrids_that_contradict_themselves_are_refused(
    make: Any, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    file = tmp_path / "model.gguf"
    values = {**hybrid_metadata("qwen3_5"), **{f"qwen35.{key}": value for key, value in change.items()}}
    file.write_bytes(gguf(values, hybrid("qwen3_5")))
    with pytest.raises(CheckpointError, match=named):
        make(file)
