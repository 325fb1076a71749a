# ruff: noqa: TID251 -- torch is what is compared with
"""Layers of linear attention (Gated DeltaNet; Yang et al., 2024) in float32 by plain torch, token by token."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

Config = Mapping[str, Any]
Tensor: TypeAlias = torch.Tensor
Weights = dict[str, Tensor]
EPS = 1e-6
"""Of the lengths of queries and keys."""


def weights(generator: torch.Generator, config: Config, residual: float) -> Weights:
    """bfloat16; decays from nearly none to a half a token. ``residual`` is the deviation of what the layer adds."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()

    rows = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_a": heads, "in_proj_b": heads}
    made = {f"linear_attn.{name}.weight": normal(count, hidden, scale=hidden**-0.5) for name, count in rows.items()}
    width = config["linear_conv_kernel_dim"]
    return made | {
        "linear_attn.conv1d.weight": normal(channels, 1, width, scale=width**-0.5),
        "linear_attn.A_log": (torch.rand(heads, generator=generator, device="cuda") * 4 + 0.05).log().bfloat16(),
        "linear_attn.dt_bias": normal(heads, scale=1.0) - 3,
        "linear_attn.norm.weight": 1 + normal(config["linear_value_head_dim"], scale=0.1),
        "linear_attn.out_proj.weight": normal(hidden, values, scale=residual * values**-0.5),
    }


def attention(config: Config, part: Weights, x: Tensor) -> Tensor:
    """What the layer makes of its normalised input [tokens, hidden]."""
    own = {name.removeprefix("linear_attn."): w.float() for name, w in part.items() if name.startswith("linear_attn.")}
    heads, dim = config["linear_num_value_heads"], config["linear_key_head_dim"]
    keys = config["linear_num_key_heads"] * dim
    mixed = x @ own["in_proj_qkv.weight"].T
    width = config["linear_conv_kernel_dim"]
    padded = torch.nn.functional.pad(mixed.T, (width - 1, 0))
    mixed = torch.nn.functional.silu(
        torch.nn.functional.conv1d(padded[None], own["conv1d.weight"], groups=len(padded))[0].T
    )
    q, k, v = mixed.split((keys, keys, mixed.shape[1] - 2 * keys), -1)
    shared = heads // config["linear_num_key_heads"]
    q, k = (_unit(part.reshape(len(x), -1, dim)).repeat_interleave(shared, 1) for part in (q, k))
    v = v.reshape(len(x), heads, -1)
    step = torch.nn.functional.softplus(x @ own["in_proj_a.weight"].T + own["dt_bias"])
    decay, beta = (-own["A_log"].exp() * step).exp(), torch.sigmoid(x @ own["in_proj_b.weight"].T)
    state = torch.zeros(heads, dim, v.shape[-1], device="cuda")
    out = torch.empty_like(v)
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        error = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * error[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(dim)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * own["norm.weight"]
    gate = torch.nn.functional.silu(x @ own["in_proj_z.weight"].T)
    return (normed.reshape(len(x), -1) * gate) @ own["out_proj.weight"].T


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
