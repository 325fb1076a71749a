"""Qwen2, for which there is no reference checkpoint: a made-up one against a forward pass in a few lines of numpy."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from atlas_core.engine.forced import forced_logits

TOKENIZER = Path(__file__).parents[1] / "data" / "tiny" / "qwen3"
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, VOCAB, THETA, EPS = 64, 4, 2, 80, 2, 512, 10000.0, 1e-6
DIM = HIDDEN // HEADS
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS, "intermediate_size": INNER, "vocab_size": VOCAB,
    "max_position_embeddings": 256, "rms_norm_eps": EPS, "rope_theta": THETA, "tie_word_embeddings": True,
    "hidden_act": "silu", "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21,
    "torch_dtype": "float32", "bos_token_id": 496, "eos_token_id": 498,
}  # fmt: skip


def make_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            shapes |= {
                f"{stem}self_attn.{name}_proj.weight": (rows, HIDDEN), f"{stem}self_attn.{name}_proj.bias": (rows,),
            }  # fmt: skip
        shapes |= {
            f"{stem}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM), f"{stem}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{stem}mlp.up_proj.weight": (INNER, HIDDEN), f"{stem}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{stem}input_layernorm.weight": (HIDDEN,), f"{stem}post_attention_layernorm.weight": (HIDDEN,),
        }  # fmt: skip
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5) + ("norm" in name)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def save(folder: Path, weights: dict[str, np.ndarray]) -> None:
    header, blob = {}, b""
    for name, array in weights.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(blob), len(blob) + array.nbytes]}
        blob += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blob)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)


def forward(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits of every position: whole sequence, complex rotation, one softmax a head."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    turn = np.exp(1j * np.arange(len(tokens))[:, None] * THETA ** (-np.arange(DIM // 2) * 2 / DIM))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * w[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        z = (x[:, : DIM // 2] + 1j * x[:, DIM // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    h = w["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        x = norm(h, f"{stem}input_layernorm.weight")
        q, k, v = (x @ w[f"{stem}self_attn.{n}_proj.weight"].T + w[f"{stem}self_attn.{n}_proj.bias"] for n in "qkv")
        heads = []
        for head in range(HEADS):
            own, at = slice(head * DIM, (head + 1) * DIM), head // (HEADS // KV_HEADS) * DIM
            score = rotate(q[:, own]) @ rotate(k[:, at : at + DIM]).T / np.sqrt(DIM)
            score = np.where(np.tri(len(tokens)) > 0, score, -np.inf)
            weight = np.exp(score - score.max(-1, keepdims=True))
            heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, at : at + DIM])
        h = h + np.concatenate(heads, -1) @ w[f"{stem}self_attn.o_proj.weight"].T
        x = norm(h, f"{stem}post_attention_layernorm.weight")
        gate = x @ w[f"{stem}mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (x @ w[f"{stem}mlp.up_proj.weight"].T)
        h = h + inner @ w[f"{stem}mlp.down_proj.weight"].T
    return norm(h, "model.norm.weight") @ w["model.embed_tokens.weight"].T


def test_logits_of_every_position(make: Any, tmp_path: Path) -> None:
    weights = make_weights()
    save(tmp_path, weights)
    tokens = np.random.default_rng(6).integers(0, VOCAB, 70)
    built = make(tmp_path, max_batch_size=70)
    (got,) = forced_logits(built.runner, built.limits, [tokens.tolist()], chunk=32)
    want = forward(weights, tokens)
    assert want.std() > 0.5
    assert np.abs(got - want).max() <= 2e-4
