"""Reading a config.json so that nothing in it is overlooked."""

from collections.abc import Iterable, Mapping
from typing import Any

from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError

_MISSING = object()
_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}

HARMLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "auto_map",
        "attention_dropout",
        "bos_token_id",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "quantization_config",
        "resid_pdrop",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
    ]
)
"""Keys that do not change the arithmetic of any decoder: training, bookkeeping, and what the tokenizer or loader reads elsewhere."""


class ConfigReader:
    """One config.json, with a note of every key that was read; ``finish`` refuses keys that nobody read.

    Keys of a nested ``text_config`` count as the model's own; a key in both places must have one value, except
    ``model_type`` and ``architectures``, which name the wrapper outside. Keys that begin with ``_`` are comments.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config") or {}
        outer = {key: value for key, value in config.items() if key != "text_config"}
        for key in set(inner) & set(outer) - {"model_type", "architectures"}:
            if inner[key] != outer[key]:
                raise contradiction(key, f"{outer[key]!r} outside text_config and {inner[key]!r} inside")
        self._config: dict[str, Any] = {**outer, **inner}
        self._read: set[str] = set()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The value of ``key``; a null counts as absent. Raises CheckpointError when it is of another type, or missing without a default."""
        self._read.add(key)
        value = self._config.get(key)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(
                    f"config.json has no {key}",
                    "the model cannot be built without it, and guessing would change its results",
                    "download the model's config.json again, or add the key",
                )
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if (isinstance(value, bool) and not {bool, object} & set(kinds)) or not isinstance(value, kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise CheckpointError(f"{key} in config.json is {value!r}", f"it must be {names}", "correct the file")
        return value

    def positive(self, key: str, default: Any = _MISSING) -> int:
        """A whole number above zero."""
        value: int = self.get(key, int, default)
        if value <= 0:
            raise CheckpointError(f"{key} in config.json is {value}", "it must be above zero", "correct the file")
        return value

    def expect(self, key: str, supported: Iterable[Any], default: Any) -> Any:
        """A value that must be one of ``supported``."""
        value = self.get(key, object, default)
        if value not in supported:
            options = ", ".join(map(repr, supported))
            raise CheckpointError(
                f"{key} = {value!r} in config.json is not supported",
                f"this model family knows {options}",
                "use a model plugin that supports it; running without it would give wrong text",
            )
        return value

    def heads(self, query: Any = _MISSING, key: Any = None) -> tuple[int, int]:
        """Heads of queries and of keys, of which there are as many unless ``key`` says otherwise; a key head serves an equal number of query heads."""
        heads = self.positive("num_attention_heads", query)
        kv_heads = self.positive("num_key_value_heads", heads if key is None else key)
        if heads % kv_heads:
            raise contradiction("num_key_value_heads", f"{heads} query heads are no multiple of {kv_heads}")
        return heads, kv_heads

    def dtype(self, default: DType = DType.F32) -> DType:
        """The type that the model was trained in: ``torch_dtype``, in newer files ``dtype``."""
        name = self.expect("torch_dtype", (*_DTYPES, None), None)
        return _DTYPES[
            name or self.expect("dtype", _DTYPES, next(n for n, dtype in _DTYPES.items() if dtype is default))
        ]

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Raises CheckpointError naming every key that was neither read nor known to be harmless."""
        known = self._read | HARMLESS | set(harmless)
        unknown = sorted(key for key in self._config if key not in known and not key.startswith("_"))
        if unknown:
            raise CheckpointError(
                f"config.json has keys that nobody reads: {', '.join(unknown)}",
                "a key that is not understood may change the model's results",
                "update the model plugin; if a key is known to be harmless, report it so that it can be listed",
            )


def contradiction(key: str, why: str) -> CheckpointError:
    """Two places that say different things about one key."""
    return CheckpointError(f"config.json contradicts itself about {key}", why, "keep the true one")


def token_ids(value: Any) -> tuple[int, ...]:
    """``eos_token_id`` as written (a number, a list, or null) as a tuple."""
    if value is None:
        return ()
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return tuple(value)
    raise CheckpointError(
        f"eos_token_id in config.json is {value!r}", "it must be a number or a list of numbers", "correct the file"
    )
