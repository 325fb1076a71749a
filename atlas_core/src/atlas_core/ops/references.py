"""The meaning of the ops of a dense decoder's forward pass, in numpy and float32."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas_core.ops.contract import Arrays
from atlas_core.ops.step import Word

Attrs = Mapping[str, Any]
PROMPT_BIT = 1 << 30
"""In a penalty row: the token occurs in the prompt. Lower bits count generated occurrences."""
_QUERIES = 64
"""Queries whose scores are held at once."""


def step_begin(a: Arrays, attrs: Attrs) -> None:
    """Apply (word, value) updates to the slots, then spread rows out into tokens.

    A negative token id stands for the slot's last token. Each token that enters is entered into its slot's penalty row.
    """
    slots, stride = a["slots"], attrs["slot_stride"]
    for word, value in a["updates"]:
        slots[word] = value
    total = int(a["cu_q"][-1])
    tokens, positions, rows = (np.zeros(total, np.int32) for _ in range(3))
    for row, slot in enumerate(a["row_slot"]):
        base = int(slot) * stride
        for offset, index in enumerate(range(a["cu_q"][row], a["cu_q"][row + 1])):
            given = a["token_ids"][index]
            token = slots[base + Word.LAST_TOKEN] if given < 0 else given
            position = slots[base + Word.POSITION] + offset
            tokens[index], positions[index], rows[index] = token, position, row
            penalty = slots[base + Word.PENALTY_ROW]
            if penalty >= 0:
                if position < slots[base + Word.PROMPT_LENGTH]:
                    a["penalty"][penalty, token] |= PROMPT_BIT
                else:
                    a["penalty"][penalty, token] += 1
    a["tokens"], a["positions"], a["token_row"] = tokens, positions, rows


def embed(a: Arrays, attrs: Attrs) -> None:
    """Rows of the embedding table."""
    a["y"] = a["weight"][a["tokens"]]


def rms_norm(a: Arrays, attrs: Attrs) -> None:
    """x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich, 2019)."""
    x = a["x"].astype(np.float64)
    a["y"] = (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + attrs["eps"]) * a["weight"]).astype(np.float32)


def add(a: Arrays, attrs: Attrs) -> None:
    """Elementwise sum."""
    a["y"] = a["x"] + a["z"]


def bias_add(a: Arrays, attrs: Attrs) -> None:
    """Add one vector to every row."""
    a["y"] = a["x"] + a["bias"]


def linear(a: Arrays, attrs: Attrs) -> None:
    """x · weightᵀ; weight is [out features, in features]."""
    a["y"] = (a["x"].astype(np.float64) @ a["weight"].astype(np.float64).T).astype(np.float32)


def rope(a: Arrays, attrs: Attrs) -> None:
    """Rotary position embedding (Su et al., 2021), halves of the rotated part paired as in GPT-NeoX.

    ``inv_freq`` has rotated/2 entries; dimensions beyond the rotated part pass through. ``scale`` multiplies sine and cosine.
    """
    heads, dim, half = attrs["heads"], attrs["head_dim"], a["inv_freq"].shape[0]
    x = a["x"].reshape(-1, heads, dim).astype(np.float64)
    angle = a["positions"].astype(np.float64)[:, None] * a["inv_freq"].astype(np.float64)[None, :]
    cos, sin = np.cos(angle)[:, None] * attrs["scale"], np.sin(angle)[:, None] * attrs["scale"]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    y = np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)
    a["y"] = y.reshape(-1, heads * dim).astype(np.float32)


def _blocks(
    a: Arrays, attrs: Attrs, row: int, positions: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(pages, tokens in page) of positions of the sequence in ``row``."""
    table = int(a["row_slot"][row]) * attrs["slot_stride"] + attrs["table_offset"]
    return a["slots"][table + positions // attrs["page_tokens"]], positions % attrs["page_tokens"]


def kv_append(a: Arrays, attrs: Attrs) -> None:
    """Write each token's key and value to its place in the pages."""
    heads, dim = attrs["kv_heads"], attrs["head_dim"]
    for row in np.unique(a["token_row"]):
        mine = np.flatnonzero(a["token_row"] == row)
        pages, tokens = _blocks(a, attrs, int(row), a["positions"][mine])
        a["cache"][attrs["layer"], pages, 0, :, tokens] = a["k"][mine].reshape(-1, heads, dim)
        a["cache"][attrs["layer"], pages, 1, :, tokens] = a["v"][mine].reshape(-1, heads, dim)


def paged_attention(a: Arrays, attrs: Attrs) -> None:
    """softmax(q·kᵀ·scale)·v over the pages, causal, with grouped query heads; ``window`` > 0 limits the look back.

    The query at position p sees keys max(0, p - window + 1) to p.
    """
    heads, kv_heads, dim = attrs["q_heads"], attrs["kv_heads"], attrs["head_dim"]
    group, out = heads // kv_heads, np.zeros_like(a["q"], dtype=np.float32)
    for row, slot in enumerate(a["row_slot"]):
        start = int(a["slots"][int(slot) * attrs["slot_stride"] + Word.POSITION])
        begin, end = int(a["cu_q"][row]), int(a["cu_q"][row + 1])
        for index in range(begin, end, _QUERIES):
            count = min(_QUERIES, end - index)
            last = start + index - begin + np.arange(count)
            first = np.maximum(0, last - attrs["window"] + 1) if attrs["window"] else np.zeros_like(last)
            seen = np.arange(first[0], last[-1] + 1)
            pages, tokens = _blocks(a, attrs, row, seen)
            kv = a["cache"][attrs["layer"]][pages, :, :, tokens].astype(np.float64)
            k, v = kv[:, 0].transpose(1, 2, 0), kv[:, 1].transpose(1, 0, 2)
            q = a["q"][index : index + count].astype(np.float64).reshape(count, kv_heads, group, dim)
            score = q.transpose(1, 2, 0, 3).reshape(kv_heads, group * count, dim) @ k * attrs["scale"]
            score = score.reshape(kv_heads, group, count, -1)
            hidden = (seen < first[:, None]) | (seen > last[:, None])
            score[:, :, hidden] = -np.inf
            weight = np.exp(score - score.max(-1, keepdims=True))
            weight /= weight.sum(-1, keepdims=True)
            y = weight.reshape(kv_heads, group * count, -1) @ v
            out[index : index + count] = y.reshape(heads, count, dim).transpose(1, 0, 2).reshape(count, heads * dim)
    a["y"] = out


def silu_mul(a: Arrays, attrs: Attrs) -> None:
    """gate · sigmoid(gate) · up (SwiGLU; Shazeer, 2020)."""
    gate = a["gate"].astype(np.float64)
    a["y"] = (gate / (1 + np.exp(-gate)) * a["up"]).astype(np.float32)


def gelu_mul(a: Arrays, attrs: Attrs) -> None:
    """gelu(gate) · up (GeGLU; Shazeer, 2020), with gelu by tanh (Hendrycks and Gimpel, 2016): g · (1 + tanh(√(2/π)·(g + 0.044715·g³))) / 2."""
    gate = a["gate"].astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    a["y"] = (gate * (1 + np.tanh(inner)) / 2 * a["up"]).astype(np.float32)


def gather_rows(a: Arrays, attrs: Attrs) -> None:
    """The rows whose logits are wanted."""
    a["y"] = a["x"][a["logits_rows"]]
