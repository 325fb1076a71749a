"""Gemma 3 in a GGUF file: weights and goldens of the tiny checkpoint, written as llama.cpp's conversion does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_file import gguf, stored

from atlas_core.engine.forced import forced_logits
from atlas_core.vocab.errors import CheckpointError

TINY = Path(__file__).parents[1] / "data" / "tiny" / "gemma3"
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    """Norms are stored as they are used."""
    found = stored(TINY)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(3):
        names |= {f"blk.{layer}.{new}.weight": f"model.layers.{layer}.{old}.weight" for old, new in PARTS.items()}
    return {new: found[old] + np.float32("norm" in new) for new, old in names.items()}


def metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of as many pieces as the tiny model has tokens."""
    numbers = {
        "block_count": 3, "context_length": 512, "embedding_length": 64, "feed_forward_length": 128, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 8, "attention.sliding_window_pattern": 3,
    }  # fmt: skip
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(0x4E00 + index) for index in range(512 - len(pieces))]
    return {
        "general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in {**numbers, **changes}.items()},
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(index) for index in range(512)],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[6] * 256, *[1] * 252], "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_space_prefix": 0,
    }  # fmt: skip


def test_logits_of_a_gguf_file(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(metadata(), tensors()))
    built = make(file, max_batch_size=64)
    with np.load(TINY / "golden.npz") as golden:
        tokens = np.concatenate([golden["input_ids"], golden["gen_ids"]])
        want = np.concatenate([golden["prefill_logits"], golden["step_logits"][1:]])
    (logits,) = forced_logits(built.runner, built.limits, [tokens.tolist()], chunk=64)
    assert np.abs(logits[: len(want)] - want).max() <= 1e-4
    spec = built.model.spec
    assert (spec.model_type, spec.eos_token_ids, spec.bos_token_id, spec.tied_embeddings) == ("gemma3", (1,), 2, True)


def test_what_the_file_leaves_out_is_what_the_converter_leaves_out(make: Any, tmp_path: Path) -> None:
    """Every sixth layer is a full one, so that none of three is."""
    values = metadata()
    del values["gemma3.attention.sliding_window_pattern"]
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(values, tensors()))
    assert [(cache.kind, cache.window, cache.layers) for cache in make(file).model.spec.caches] == [("sliding", 8, 3)]


def test_soft_caps_are_another_model(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(metadata(final_logit_softcapping=30.0), tensors()))
    with pytest.raises(CheckpointError, match="final_logit_softcapping"):
        make(file)


def test_the_same_model_in_both_spellings_of_its_configuration(make: Any, tmp_path: Path) -> None:
    for file in TINY.iterdir():
        if not file.name.startswith("config"):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((TINY / "config.v5.json").read_text())))
    assert make(tmp_path).model.spec == make(TINY).model.spec
