"""GGUF metadata as a Hugging Face configuration."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from atlas_core.vocab.errors import CheckpointError
from atlas_quant_gguf.architectures import ARCHITECTURES, Architecture
from atlas_quant_gguf.keys import Keys
from atlas_quant_gguf.metadata import GgufHeader
from atlas_quant_gguf.texts import Texts

ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_DTYPES = {"f16": "float16", "bf16": "bfloat16"}


class HubConfig(Struct, frozen=True):
    """``values`` is in the shape of config.json; ``consumed_tensors`` are told by it and are no weights any more."""

    values: Mapping[str, Any]
    consumed_tensors: frozenset[str]


def hub_config(header: GgufHeader, path: Path, read: Callable[[str], memoryview]) -> HubConfig:
    """The configuration of the file's model.

    Every key of the architecture is used or the file is refused. ``read`` gives a tensor's bytes. Raises CheckpointError
    naming the key.
    """
    metadata = header.metadata
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{path} is no model", f"its general.type is {kind!r}", "name the model's own file")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} is of the architecture {architecture!r}, which cannot be read from GGUF",
            f"known are {', '.join(ARCHITECTURES)}",
            "use the model's safetensors checkpoint",
        )
    keys, found = Keys(architecture, metadata, path), ARCHITECTURES[architecture]
    values = _common(keys, found, header, path)
    values["model_type"], values["architectures"] = found.model_type, [found.hub_class]
    values["rope_scaling"] = _rope_scaling(keys, header, values, read)
    values |= found.more(keys, values, header)
    keys.check_all_used()
    return HubConfig(values, frozenset({ROPE_FACTORS} & header.tensors.keys()))


def generation_defaults(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """generation_config.json's token ids: a turn ends at eos and, where it is another token, at eot.

    Raises CheckpointError for an id that is not a number.
    """
    ids: dict[str, Any] = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("eot", "eot")):
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in metadata:
            continue
        if type(metadata[key]) is not int or metadata[key] < 0:
            raise CheckpointError(
                f"{path}: the key {key} is {metadata[key]!r}", "a token id is expected", "use another file"
            )
        ids[f"{role}_token_id"] = metadata[key]
    turn_end = ids.pop("eot_token_id", None)
    if turn_end is not None and turn_end != ids.get("eos_token_id"):
        ids["eos_token_id"] = [ids["eos_token_id"], turn_end] if "eos_token_id" in ids else turn_end
    return ids


def _common(keys: Keys, found: Architecture, header: GgufHeader, path: Path) -> dict[str, Any]:
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    whole = ("attention.value_length",) if found.partial else ("attention.value_length", "rope.dimension_count")
    for same in whole:
        if keys.integer(same, head_dim) != head_dim:
            raise keys.bad(same, keys.integer(same), f"the head size {head_dim}")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    tokens_known = len(tokens) if isinstance(tokens, list | Texts) and tokens else None
    stored = {tensor.layout.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    only = stored.pop() if len(stored) == 1 else ""
    return {
        "hidden_size": hidden,
        **_intermediate(keys, found),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": keys.integer("vocab_size", tokens_known),
        "torch_dtype": _DTYPES.get(only, "float32"),  # blocks are defined by the float32 values that they decode to
        **{
            key: value
            for key, value in generation_defaults(header.metadata, path).items()
            if not isinstance(value, list)
        },
    }


def _intermediate(keys: Keys, found: Architecture) -> dict[str, Any]:
    """Of dense networks, which mixtures alone need not have."""
    optional = found.sparse and not keys.has("feed_forward_length")
    return {} if optional else {"intermediate_size": keys.integer("feed_forward_length")}


def _rope_scaling(
    keys: Keys, header: GgufHeader, values: Mapping[str, Any], read: Callable[[str], memoryview]
) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    if keys.has("rope.scale_linear") and kind == "none":  # the older spelling
        factor = keys.real("rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise keys.bad("rope.scaling.type", kind, f"none beside {ROPE_FACTORS}")
        if header.tensors[ROPE_FACTORS].layout.name != "f32":
            raise keys.bad(ROPE_FACTORS, header.tensors[ROPE_FACTORS].layout.name, "f32")
        return _llama3(np.frombuffer(read(ROPE_FACTORS), "<f4"), values, keys)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.real("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": keys.real("rope.scaling.factor"),
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        }
    raise keys.bad("rope.scaling.type", kind, "none, linear or yarn")


def _llama3(factors: np.ndarray, values: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Llama 3's scaling, which the file holds only as the divisors that follow from it, one for each pair of a head."""
    if factors.shape != (values["head_dim"] // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise keys.bad(ROPE_FACTORS, list(factors.shape), f"{values['head_dim'] // 2} positive numbers")
    factor = float(factors.max())
    scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if not np.allclose(llama3_divisors(scaling, values["rope_theta"], values["head_dim"]), factors, rtol=1e-4):
        raise keys.bad(ROPE_FACTORS, "another scaling", f"what follows from {scaling}")
    return scaling


def llama3_divisors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """By what each rotation frequency is divided, float64 of (head_dim / 2,).

    Wavelengths below original / high are kept, those above original / low are divided by ``factor``, and between the two
    the reciprocal goes linearly in original / wavelength (the Llama 3.1 release's scaling of frequencies).
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0.0, 1.0)
    divisors: np.ndarray = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    return divisors
