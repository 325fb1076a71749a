"""The files that both engines read: one model in several encodings, and one with the shapes of a Gemma."""

from pathlib import Path

import gguf
import numpy as np
from cpu.children import Engines

from atlas_quant_gguf.formats import GgufFormat

KINDS = {"Q4_0": 2, "Q8_0": 7, "Q4_K": 15}
"""llama_ftype of each encoding; Q4_K is the mixture Q4_K_M."""
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 2048, 16384, 8, 1, 2
"""Gemma 2B, but for the number of layers."""


def encoded(source: Path, folder: Path, engines: Engines, name: str) -> Path:
    """``source`` as it is (Q4_1), or encoded again; a file that exists already is kept."""
    if name not in KINDS:
        return source
    path = folder / f"{source.stem}.{name}.gguf"
    if not path.exists():
        engines.quantise(source, path, KINDS[name])
    return path


def gemma_shaped(source: Path, folder: Path, layout: str) -> Path:
    """Random weights with the shapes of Gemma 2B in a Llama's layers, and the tokenizer of ``source``."""
    path = folder / f"gemma-shaped.{layout}.gguf"
    if path.exists():
        return path
    writer = gguf.GGUFWriter(path, "llama")
    _copy_tokenizer(gguf.GGUFReader(source), writer)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    vocabulary = 49152
    writer.add_vocab_size(vocabulary)
    keys = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    made = {name: _random(layout, shape) for name, shape in shapes.items()}
    _add(writer, "token_embd.weight", _random(layout, (vocabulary, HIDDEN)), layout)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, data in made.items():
            _add(writer, f"blk.{layer}.{name}.weight", data, layout)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random(layout: str, shape: tuple[int, int]) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
    return np.frombuffer(GgufFormat().encode(layout, values), np.uint8).reshape(shape[0], -1)


def _add(writer: gguf.GGUFWriter, name: str, data: np.ndarray, layout: str) -> None:
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[layout.upper()])


def _copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub)
