"""The tokenizer of a GGUF file as a tokenizer.json without its tables, and the tables."""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from atlas_core.contracts.checkpoint import BpeTables, TokenizerSource
from atlas_core.vocab.errors import CheckpointError
from atlas_quant_gguf.texts import Texts

_CURE = "use the model's safetensors checkpoint, whose tokenizer.json needs no rebuilding"
_ROLES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator",
    "mask_token": "mask", "eot_token": "eot",
}  # fmt: skip
# "seperator" is how the format spells it.

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words with the marks on their letters."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Kind(IntEnum):
    """What tokenizer.ggml.token_type says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_ADDED = frozenset({_Kind.CONTROL, _Kind.USER_DEFINED, _Kind.UNKNOWN})


def tokenizer_source(metadata: Mapping[str, Any], path: Path) -> TokenizerSource:
    """The tokenizer with its templates and special tokens. Raises CheckpointError for a kind that is not known."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _whole(_strings(metadata, _TOKENS, path), _TOKENS, path)
    kinds = metadata.get("tokenizer.ggml.token_type", [int(_Kind.NORMAL)] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or set(map(type, kinds)) != {int}:
        raise _refuse(path, "tokenizer.ggml.token_type does not hold one number for each token")
    merges: Callable[[], Sequence[tuple[str, str]]]
    if model == "gpt2":
        parts, add_bos = _byte_level(metadata, path)
        merges = partial(_listed_merges, _strings(metadata, _MERGES, path), path)
    elif model == "llama":
        scores = _scores(metadata, tokens, path)
        parts, add_bos = _sentencepiece(metadata, tokens, kinds, path), True
        merges = partial(_scored_merges, tokens, kinds, scores)
    else:
        raise _refuse(path, f"its tokenizer.ggml.model is {model!r}; gpt2 and llama are known")
    for key in ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_sep_token"):
        if metadata.get(key) is True:
            raise _refuse(path, f"it ends every text with a token of its own ({key}), as no chat model does")
    added = [
        {
            "id": index, "content": tokens[index], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": kind != _Kind.USER_DEFINED,
        }
        for index, kind in enumerate(kinds)
        if kind in _ADDED
    ]  # fmt: skip
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None, **parts,
    }  # fmt: skip
    return TokenizerSource(
        json=json.dumps(document, ensure_ascii=False),
        chat_templates=_templates(metadata, path),
        special=_special(metadata, tokens, path),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        tables=BpeTables(tokens, merges),
    )


def _byte_level(metadata: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], bool]:
    """Parts of a byte-level BPE tokenizer.json, and whether bos is added unless the file says otherwise."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    rule = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        raise _refuse(
            path, f"its pre-tokenizer (tokenizer.ggml.pre) is {name!r}; known are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    splits, normalizer, ignore_merges, add_bos = rule
    prefix = metadata.get("tokenizer.ggml.add_space_prefix") is True
    last = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, last]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ignore_merges=ignore_merges),
    }, add_bos


def _listed_merges(merges: Sequence[str], path: Path) -> list[tuple[str, str]]:
    pairs = []
    for merge in _whole(merges, _MERGES, path):
        left, blank, right = merge.partition(" ")
        if not (left and blank and right) or " " in right:
            raise _refuse(path, f"the merge {merge!r} is not two tokens")
        pairs.append((left, right))
    return pairs


def _scores(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(type(score) is float for score in scores):
        raise _refuse(path, "tokenizer.ggml.scores does not hold one number for each token")
    return scores


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], path: Path
) -> dict[str, Any]:
    """Parts of a tokenizer.json that merges as SentencePiece's BPE does: always the pair that makes the best-scored piece."""
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces") is True:
        raise _refuse(
            path, "it removes blanks (tokenizer.ggml.remove_extra_whitespaces), which cannot be undone in answers"
        )
    unknown = next((tokens[index] for index, kind in enumerate(kinds) if kind == _Kind.UNKNOWN), None)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), replace],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if prefix else []),
            ],
        },
        "model": _bpe(unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _scored_merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of pieces whose concatenation is a piece, best score first."""
    made = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_Kind.NORMAL, _Kind.USER_DEFINED, _Kind.UNUSED)
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in made.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in made and right in made:
                ranked.append((-scores[index], index, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(**options: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **options, "vocab": {}, "merges": [],
    }  # fmt: skip


def _special(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for role, key in _ROLES.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise _refuse(path, f"tokenizer.ggml.{key}_token_id is {index!r}, and there are {len(tokens)} tokens")
        found[role] = tokens[index]
    return found


def _templates(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    stem = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == stem or key.startswith(stem + "."):
            if not isinstance(value, str):
                raise _refuse(path, f"{key} is not a string")
            templates[key.removeprefix(stem).removeprefix(".") or "default"] = value
    return templates


def _strings(metadata: Mapping[str, Any], key: str, path: Path) -> Sequence[str]:
    value = metadata.get(key)
    if isinstance(value, Texts) or (isinstance(value, list) and value and all(isinstance(item, str) for item in value)):
        return value
    raise _refuse(path, f"it has no {key}")


def _whole(strings: Sequence[str], key: str, path: Path) -> Sequence[str]:
    """The same strings, all of which are UTF-8."""
    if isinstance(strings, Texts):
        try:
            strings.check()
        except UnicodeDecodeError as error:
            why = f"at byte {strings.place + error.start} of the file {key} is not UTF-8: {error.reason}"
            raise _refuse(path, why) from error
    return strings


def _refuse(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the tokenizer of {path} cannot be rebuilt", why, _CURE)


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _rules() -> dict[str, tuple[list[dict[str, Any]], dict[str, str] | None, bool, bool]]:
    """tokenizer.ggml.pre → splits, normalizer, ignore_merges, and whether bos is added by default."""
    gpt2 = ([_split(_GPT2)], None, False, False)
    digits = ([{"type": "Digits", "individual_digits": True}, _split(_GPT2)], None, False, False)
    llama3 = ([_split(_WORDS.format(digits="{1,3}"))], None, True, True)
    qwen2 = ([_split(_WORDS.format(digits=""))], {"type": "NFC"}, False, False)
    qwen35 = ([_split(_MARKED)], {"type": "NFC"}, False, False)
    unnamed = (
        [
            _split(r"[\p{P}\$\+<=>\^~\|]+"),
            _split(_GPT2.removesuffix(r"|\s+")),
            _split(r"\p{N}+"),
            _split(r"[0-9][0-9][0-9]"),
        ],
        None,
        False,
        False,
    )
    return {
        "default": unnamed, "gpt-2": gpt2, "smollm": digits, "llama-bpe": llama3, "llama3": llama3, "llama-v3": llama3,
        "qwen2": qwen2, "deepseek-r1-qwen": qwen2, "qwen35": qwen35,
    }  # fmt: skip


_PRE_TOKENIZERS = _rules()
