# ruff: noqa: TID251 -- torch is what is compared with
"""Decoders in float32 by plain torch, and checkpoints of random weights for them: what GPU targets are held against.

A layer is two functions of the normalised residual stream; ``ATTENTIONS`` and ``NETWORKS`` have one for each kind, and one that
makes its weights. A further kind of layer is two functions more. Nothing here is fast, and nothing is shared with what serves.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch_linear as linear

Config = Mapping[str, Any]
Tensor: TypeAlias = torch.Tensor
Weights = dict[str, Tensor]

RESIDUAL, ROUTER, HEAD = 0.5, 4.0, 1.5
"""Standard deviations: of what a layer adds to a stream of 1, about; of router logits, since trained routers are peaked and flat
ones hang on rounding; of logits."""

LEAD = 0.05
"""Between the best two logits, in float32: below it rounding may decide."""


def seeded(config: Config, seed: int) -> Weights:
    """bfloat16 weights on the GPU, named as transformers names them. The stream of residuals starts at a deviation of 1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    weights = {
        "model.embed_tokens.weight": _normal(generator, vocabulary, hidden, scale=1.0),
        "model.norm.weight": _norm(generator, hidden),
    }
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = _normal(generator, vocabulary, hidden, scale=HEAD / math.sqrt(hidden))
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{stem}{part}.weight"] = _norm(generator, hidden)
        for table, kind in ((ATTENTIONS, _attention_kind(config, layer)), (NETWORKS, _network_kind(config, layer))):
            weights |= {stem + name: tensor for name, tensor in table[kind][0](generator, config).items()}
    return {name: w - 1 if _centred(config, name) else w for name, w in weights.items()}


def save(config: Config, weights: Weights, folder: Path) -> None:
    """A checkpoint as the hub has them, one tensor after another: the whole does not pass through memory twice."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    header: dict[str, Any] = {}
    end = 0
    for name, w in weights.items():
        assert w.dtype == torch.bfloat16
        start, end = end, end + w.numel() * w.element_size()
        header[name] = {"dtype": "BF16", "shape": list(w.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for w in weights.values():
            file.write(w.contiguous().view(torch.uint8).cpu().numpy())


def logits(config: Config, weights: Weights, ids: list[int]) -> Tensor:
    """float32 [tokens, vocabulary] on the GPU."""
    return _linear(hidden(config, weights, ids), weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))


def hidden(config: Config, weights: Weights, ids: list[int]) -> Tensor:
    """float32 [tokens, hidden size] behind the final norm, on the GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    eps = config["rms_norm_eps"]
    weights = {name: w.float() + 1 if _centred(config, name) else w for name, w in weights.items()}
    h = weights["model.embed_tokens.weight"][torch.tensor(ids, device="cuda")].float()
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        part = {name.removeprefix(stem): tensor for name, tensor in weights.items() if name.startswith(stem)}
        x = _normalised(h, part["input_layernorm.weight"], eps)
        h = h + ATTENTIONS[_attention_kind(config, layer)][1](config, part, x)
        x = _normalised(h, part["post_attention_layernorm.weight"], eps)
        h = h + NETWORKS[_network_kind(config, layer)][1](config, part, x)
    return _normalised(h, weights["model.norm.weight"], eps)


def difference(want: Tensor, got: np.ndarray) -> tuple[float, float, int, int]:
    """(largest, mean) |Δlogit|; positions with a clear lead, and those of them where the best token agrees."""
    found = torch.from_numpy(got).cuda()
    error = (want - found).abs()
    top = want.topk(2, -1)
    clear = top.values[:, 0] - top.values[:, 1] > LEAD
    agreed = (found.argmax(-1) == top.indices[:, 0]) & clear
    return float(error.max()), float(error.mean()), int(clear.sum()), int(agreed.sum())


def _hybrid(config: Config) -> bool:
    return str(config["model_type"]).startswith("qwen3_5")


def _centred(config: Config, name: str) -> bool:
    """Whether a weight is stored less one: norms of hybrids, but for those of linear attention."""
    return _hybrid(config) and "norm" in name and "linear_attn" not in name


def _attention_kind(config: Config, layer: int) -> str:
    if "layer_types" in config:
        return str(config["layer_types"][layer])
    interval = config.get("full_attention_interval")
    return "linear_attention" if interval and (layer + 1) % interval else "full_attention"


def _network_kind(config: Config, layer: int) -> str:
    sparse = config.get("num_experts") and layer not in config.get("mlp_only_layers", [])
    return "mixture" if sparse else "dense"


def _normal(generator: torch.Generator, *shape: int, scale: float) -> Tensor:
    return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()


def _norm(generator: torch.Generator, size: int) -> Tensor:
    return (1 + 0.1 * torch.randn(size, generator=generator, device="cuda")).bfloat16()


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ weight.float().T
    return y if bias is None else y + bias.float()


# Full attention.


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _attention_weights(generator: torch.Generator, config: Config) -> Weights:
    hidden, dim = config["hidden_size"], _head_dim(config)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    made = {}
    for part, count in heads.items():
        # Queries of hybrids have their gates behind them, head by head.
        rows = count * dim * (2 if part == "q" and _hybrid(config) else 1)
        made[f"self_attn.{part}_proj.weight"] = _normal(generator, rows, hidden, scale=hidden**-0.5)
        if config["model_type"] == "qwen2":
            made[f"self_attn.{part}_proj.bias"] = _normal(generator, count * dim, scale=0.5)
        if config["model_type"].startswith("qwen3") and part != "v":
            made[f"self_attn.{part}_norm.weight"] = _norm(generator, dim)
    inner = heads["q"] * dim
    return made | {"self_attn.o_proj.weight": _normal(generator, hidden, inner, scale=RESIDUAL * inner**-0.5)}


def _frequencies(config: Config, dim: int) -> Tensor:
    """Of the rotary pairs; "llama3" stretches the slow ones (Llama 3.1). Of hybrids a part of each head turns."""
    inner = config.get("rope_parameters", {})
    dim = int(dim * inner.get("partial_rotary_factor", 1))
    plain = config.get("rope_theta", inner.get("rope_theta")) ** (
        -torch.arange(0, dim, 2, device="cuda", dtype=torch.float64) / dim
    )
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain
    if scaling.get("rope_type") != "llama3":
        raise SystemExit(f"rope_scaling {scaling} is unknown here")
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling["factor"])


def _rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    """x [tokens, heads, dim] from position 0 on; dimension i turns with i + dim / 2."""
    angle = torch.arange(len(x), device="cuda", dtype=torch.float64)[:, None, None] * frequencies
    sine, cosine = angle.sin().float(), angle.cos().float()
    turned, rest = x[..., : 2 * len(frequencies)], x[..., 2 * len(frequencies) :]
    first, second = turned.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), -1)


def _attention(config: Config, part: Weights, x: Tensor) -> Tensor:
    dim, eps = _head_dim(config), config["rms_norm_eps"]
    rows = torch.arange(len(part["self_attn.q_proj.weight"]), device="cuda")
    gates = rows // dim % 2 if _hybrid(config) else torch.zeros_like(rows)

    def projected(name: str) -> Tensor:
        y = _linear(x, part[f"self_attn.{name}_proj.weight"], part.get(f"self_attn.{name}_proj.bias"))
        y = (y[:, gates == 0] if name == "q" else y).view(len(x), -1, dim)
        weight = part.get(f"self_attn.{name}_norm.weight")
        return y if weight is None else _normalised(y, weight, eps)

    frequencies = _frequencies(config, dim)
    q, k, v = _rotated(projected("q"), frequencies), _rotated(projected("k"), frequencies), projected("v")
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    unseen = torch.ones(len(x), len(x), device="cuda", dtype=torch.bool).triu(1)
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        unseen |= torch.ones_like(unseen).tril(-config["sliding_window"])
    odds = scores.masked_fill(unseen, -math.inf).softmax(-1)
    y = torch.einsum("hqk,khd->qhd", odds, v).reshape(len(x), -1)
    if _hybrid(config):
        y = y * torch.sigmoid(_linear(x, part["self_attn.q_proj.weight"])[:, gates == 1])
    return _linear(y, part["self_attn.o_proj.weight"])


# Networks.


def _swiglu_weights(generator: torch.Generator, hidden: int, size: int, stem: str) -> Weights:
    return {
        f"{stem}gate_proj.weight": _normal(generator, size, hidden, scale=hidden**-0.5),
        f"{stem}up_proj.weight": _normal(generator, size, hidden, scale=hidden**-0.5),
        f"{stem}down_proj.weight": _normal(generator, hidden, size, scale=RESIDUAL * size**-0.5),
    }


def _swiglu(part: Weights, stem: str, x: Tensor) -> Tensor:
    gate, up = _linear(x, part[f"{stem}gate_proj.weight"]), _linear(x, part[f"{stem}up_proj.weight"])
    return _linear(torch.nn.functional.silu(gate) * up, part[f"{stem}down_proj.weight"])


def _dense_weights(generator: torch.Generator, config: Config) -> Weights:
    return _swiglu_weights(generator, config["hidden_size"], config["intermediate_size"], "mlp.")


def _dense(_: Config, part: Weights, x: Tensor) -> Tensor:
    return _swiglu(part, "mlp.", x)


def _mixture_weights(generator: torch.Generator, config: Config) -> Weights:
    hidden = config["hidden_size"]
    made = {"mlp.gate.weight": _normal(generator, config["num_experts"], hidden, scale=ROUTER * hidden**-0.5)}
    for expert in range(config["num_experts"]):
        made |= _swiglu_weights(generator, hidden, config["moe_intermediate_size"], f"mlp.experts.{expert}.")
    if shared := config.get("shared_expert_intermediate_size"):
        made |= _swiglu_weights(generator, hidden, shared, "mlp.shared_expert.")
        made["mlp.shared_expert_gate.weight"] = _normal(generator, 1, hidden, scale=hidden**-0.5)
    return made


def _mixture(config: Config, part: Weights, x: Tensor) -> Tensor:
    odds = _linear(x, part["mlp.gate.weight"]).softmax(-1)
    weights, experts = odds.topk(config["num_experts_per_tok"], -1)
    if config.get("norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        y[rows] += _swiglu(part, f"mlp.experts.{expert}.", x[rows]) * weights[rows, places, None]
    if "mlp.shared_expert_gate.weight" in part:
        opening = torch.sigmoid(_linear(x, part["mlp.shared_expert_gate.weight"]))
        y = y + opening * _swiglu(part, "mlp.shared_expert.", x)
    return y


Make = Callable[[torch.Generator, Config], Weights]
Run = Callable[[Config, Weights, Tensor], Tensor]
ATTENTIONS: dict[str, tuple[Make, Run]] = {
    "full_attention": (_attention_weights, _attention),
    "linear_attention": (lambda generator, config: linear.weights(generator, config, RESIDUAL), linear.attention),
}
NETWORKS: dict[str, tuple[Make, Run]] = {"dense": (_dense_weights, _dense), "mixture": (_mixture_weights, _mixture)}
