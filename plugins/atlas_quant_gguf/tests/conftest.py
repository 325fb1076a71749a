"""A small GGUF writer, so that tests can make every file that they need, whole or broken."""

import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

Build = Callable[..., bytes]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    kinds = [_value(item) for item in value]
    return 9, struct.pack("<IQ", kinds[0][0] if kinds else 4, len(kinds)) + b"".join(data for _, data in kinds)


def _build(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]], version: int = 3
) -> bytes:
    """``tensors``: name → (shape outermost first, ggml type, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        out += _string(key) + struct.pack("<I", kind) + data
    alignment = metadata.get("general.alignment", 32)
    offset = 0
    for name, (shape, kind, data) in tensors.items():
        extents = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += _string(name) + struct.pack("<I", len(shape)) + extents + struct.pack("<IQ", kind, offset)
        offset += -(-len(data) // alignment) * alignment
    for _, _, data in tensors.values():
        out += b"\0" * (-len(out) % alignment) + data
    return out


_LETTERS = [chr(code) for code in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]]


def _metadata(architecture: str = "llama") -> dict[str, Any]:
    """A model of one layer and two heads of 6, with a byte-level tokenizer of 256 letters, two merges and two controls."""
    tokens = ["<|start|>", "<|end|>", *_LETTERS, "he", "ll"]
    return {
        "general.architecture": architecture,
        "general.name": "toy",
        f"{architecture}.block_count": 1,
        f"{architecture}.context_length": 64,
        f"{architecture}.embedding_length": 12,
        f"{architecture}.feed_forward_length": 32,
        f"{architecture}.attention.head_count": 2,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def _tensors() -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    rng = np.random.default_rng(5)
    return {
        "token_embd.weight": ((260, 12), 0, rng.standard_normal((260, 12), np.float32).tobytes()),
        "blk.0.attn_q.weight": ((12, 32), 3, bytes(range(240))),
        "output_norm.weight": ((12,), 0, np.arange(12, dtype=np.float32).tobytes()),
    }


@pytest.fixture
def build() -> Build:
    return _build


@pytest.fixture
def metadata() -> Callable[..., dict[str, Any]]:
    return _metadata


@pytest.fixture
def tensors() -> Callable[[], dict[str, tuple[tuple[int, ...], int, bytes]]]:
    return _tensors
