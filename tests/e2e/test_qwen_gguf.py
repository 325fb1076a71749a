"""Mixtures of experts in a GGUF file: the weights and the goldens of a checkpoint whose layers are all mixtures."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_core.engine.forced import forced_logits
from atlas_core.vocab.errors import CheckpointError

TINY = Path(__file__).parents[1] / "data" / "tiny" / "qwen3_vl_moe"
F32 = 0
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


def stored() -> dict[str, np.ndarray]:
    data = (TINY / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: np.frombuffer(data[start:], np.float32)[slice(*(at // 4 for at in entry["data_offsets"]))].reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    """The text model under the names of GGUF; gate and up lie apart there."""
    found, text = stored(), "model.language_model."
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


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    kinds = [typed(item) for item in value]
    return 9, struct.pack("<IQ", kinds[0][0], len(kinds)) + b"".join(data for _, data in kinds)


def gguf(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(values))
    for key, value in values.items():
        kind, data = typed(value)
        out += text(key) + struct.pack("<I", kind) + data
    offset = 0
    for name, array in arrays.items():
        extents = struct.pack(f"<I{array.ndim}Q", array.ndim, *reversed(array.shape))
        out += text(name) + extents + struct.pack("<IQ", F32, offset)
        offset += -(-array.nbytes // 32) * 32
    for array in arrays.values():
        out += b"\0" * (-len(out) % 32) + array.tobytes()
    return out


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
