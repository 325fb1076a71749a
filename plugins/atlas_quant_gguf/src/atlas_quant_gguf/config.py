"""GGUF metadata as a Hugging Face configuration."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from atlas_core.vocab.errors import CheckpointError
from atlas_quant_gguf.metadata import GgufHeader
from atlas_quant_gguf.texts import Texts

ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LARGEST = float(np.finfo(np.float32).max)
_DTYPES = {"f16": "float16", "bf16": "bfloat16"}
_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM", "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForConditionalGeneration", "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3": "Gemma3ForCausalLM",
}  # fmt: skip
_MODEL_TYPES = {
    "qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe",
    "gemma3": "gemma3_text",
}  # fmt: skip
"""Where the two worlds spell a family differently."""
HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
"""Layers of linear attention between those of full attention."""
_SOFTMAX = 1
_GEMMA_27B = 62


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
    if not isinstance(architecture, str) or architecture not in _CLASSES:
        raise CheckpointError(
            f"{path} is of the architecture {architecture!r}, which cannot be read from GGUF",
            f"known are {', '.join(_CLASSES)}",
            "use the model's safetensors checkpoint",
        )
    keys = _Keys(architecture, metadata, path)
    values = _common(keys, header, path)
    values["model_type"] = _MODEL_TYPES.get(architecture, architecture)
    values["architectures"] = [_CLASSES[architecture]]
    values["rope_scaling"] = _rope_scaling(keys, header, values, read)
    if architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        values["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    elif architecture in HYBRIDS:
        values |= _hybrid(keys, values, header)
        values |= _experts(keys) if architecture != "qwen35" else {}
    elif architecture in ("qwen3", "qwen3moe"):
        values["attention_bias"] = False
        values |= _experts(keys) if architecture == "qwen3moe" else {}
    elif architecture == "gemma3":
        values |= _gemma(keys, values)
    else:
        values["use_sliding_window"] = False
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


class _Keys:
    """The keys ``<architecture>.*``, each asked for by name and type."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any], path: Path) -> None:
        self.architecture = architecture
        self._prefix = f"{architecture}."
        self._metadata = metadata
        self._path = path
        self._used: set[str] = set()

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._take(name, default)
        if isinstance(value, list) and value and len(set(map(repr, value))) == 1:
            value = value[0]  # one count a layer, all the same
        if type(value) is not int or value <= 0:
            raise self.bad(name, value, "a positive whole number, the same for every layer")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._take(name, default)
        if type(value) not in (float, int) or not 0 < value < _LARGEST:
            raise self.bad(name, value, "a positive number")
        # Files hold float32: the shortest decimal that gives it back is the number its author wrote.
        return float(str(np.float32(value)))

    def text(self, name: str, default: str) -> str:
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self.bad(name, value, "a string")
        return value

    def count(self, name: str) -> int:
        value = self._take(name, 0)
        if type(value) is not int or value < 0:
            raise self.bad(name, value, "a whole number")
        return value

    def numbers(self, name: str) -> list[int]:
        value = self._take(name, [])
        if not isinstance(value, list) or any(type(part) is not int or part < 0 for part in value):
            raise self.bad(name, value, "a list of whole numbers")
        return value

    def has(self, name: str) -> bool:
        return self._prefix + name in self._metadata

    def bad(self, name: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: the key {self._prefix}{name} is {value!r}", f"{expected} is expected", "use another file"
        )

    def check_all_used(self) -> None:
        unused = [
            key
            for key in self._metadata
            if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in self._used
        ]
        # Counts of parts that the model could have and has none of.
        unused = [key for key in unused if self._metadata[key] not in (0, False, [])]
        if unused:
            raise CheckpointError(
                f"{self._path}: the key {unused[0]} = {str(self._metadata[unused[0]])[:60]} is not understood",
                "it may change what the model computes",
                "use the model's safetensors checkpoint, or a newer atlas-quant-gguf",
            )

    def _take(self, name: str, default: Any) -> Any:
        self._used.add(name)
        value = self._metadata.get(self._prefix + name, default)
        if value is None:
            raise CheckpointError(
                f"{self._path} lacks the key {self._prefix}{name}",
                "the model cannot be built without it",
                "use another file",
            )
        return value


def _common(keys: _Keys, header: GgufHeader, path: Path) -> dict[str, Any]:
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    whole = (
        ("attention.value_length",)
        if keys.architecture in HYBRIDS
        else ("attention.value_length", "rope.dimension_count")
    )
    for same in whole:
        if keys.integer(same, head_dim) != head_dim:
            raise keys.bad(same, keys.integer(same), f"the head size {head_dim}")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    tokens_known = len(tokens) if isinstance(tokens, list | Texts) and tokens else None
    stored = {tensor.layout.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    only = stored.pop() if len(stored) == 1 else ""
    return {
        "hidden_size": hidden,
        **_intermediate(keys),
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


def _intermediate(keys: _Keys) -> dict[str, Any]:
    """Of dense networks, which mixtures alone need not have."""
    optional = keys.architecture in ("qwen3next", "qwen35moe") and not keys.has("feed_forward_length")
    return {} if optional else {"intermediate_size": keys.integer("feed_forward_length")}


def _hybrid(keys: _Keys, common: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    """What layers of linear attention add (llama.cpp's conversion of Qwen3-Next and Qwen3.5).

    Value heads of qwen35 are not grouped by key head: value head i belongs to key head i modulo their number. As no order of rows
    would undo that in the columns of the output projection, keys are repeated instead: there are as many as values, and
    ``linear_stored_key_heads`` says of how many. Drafting layers lie behind the others.
    """
    keys_stored, values = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    inner, layers = keys.integer("ssm.inner_size"), common["num_hidden_layers"]
    if inner % values or values % keys_stored:
        raise keys.bad(
            "ssm.inner_size", inner, f"{values} value heads of one size, a multiple of {keys_stored} key heads,"
        )
    tiled = keys.architecture != "qwen3next"
    rotated, head_dim = keys.integer("rope.dimension_count", common["head_dim"]), common["head_dim"]
    found: dict[str, Any] = {
        "num_hidden_layers": layers - keys.count("nextn_predict_layers"),
        "linear_num_key_heads": values if tiled else keys_stored,
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "full_attention_interval": keys.integer("full_attention_interval", 4),
        "partial_rotary_factor": rotated / head_dim,
        "attention_bias": False,
    }
    if tiled:
        found["linear_stored_key_heads"] = keys_stored
    sections = keys.numbers("rope.dimension_sections")
    if sections:
        found["mrope_section"] = [part for part in sections if part]
    if keys.architecture != "qwen35":
        found["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    return found


def _experts(keys: _Keys) -> dict[str, Any]:
    """Mixtures in every layer. The format cannot say that weights are not normalised: the architecture's always are."""
    if keys.integer("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise keys.bad("expert_gating_func", keys.integer("expert_gating_func"), "1, the softmax,")
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(keys: _Keys, common: Mapping[str, Any]) -> dict[str, Any]:
    """Windows of attention. The format says neither how scores are scaled nor, in older files, which layers are full ones.

    llama.cpp knows the one model whose scores are not scaled by its head size by its 62 layers.
    """
    layers = common["num_hidden_layers"]
    scalar = common["hidden_size"] // common["num_attention_heads"] if layers == _GEMMA_27B else common["head_dim"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
        "rope_theta": keys.real("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": scalar,
    }


def _rope_scaling(
    keys: _Keys, header: GgufHeader, values: Mapping[str, Any], read: Callable[[str], memoryview]
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


def _llama3(factors: np.ndarray, values: Mapping[str, Any], keys: _Keys) -> dict[str, Any]:
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
