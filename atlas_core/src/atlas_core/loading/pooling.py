"""What the files of the sentence-transformers library say of a model directory: whether it embeds texts, and how."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from atlas_core.contracts.checkpoint import Pooling
from atlas_core.vocab.errors import CheckpointError

Read = Callable[[str], Any]
"""The JSON in a file of the directory, or None where there is no such file. Raises CheckpointError."""

_KINDS: Mapping[str, Literal["last", "cls", "mean"]] = {"lasttoken": "last", "cls": "cls", "mean": "mean"}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken", "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip


def read_pooling(path: Path, config: Mapping[str, Any], read: Read) -> Pooling | None:
    """How the model in ``path`` makes vectors; None for one that was not made to.

    Raises CheckpointError where it does so in a way that is not served here: with other modules or poolings, or by attention in
    both directions.
    """
    modules = read("modules.json")
    if modules is None:
        return None
    names, folders = _modules(path, modules)
    if names[:2] != ["Transformer", "Pooling"] or names[2:] not in ([], ["Normalize"]):
        raise _refused(
            path, "modules.json", f"its modules are {', '.join(names) or 'none'}", "Transformer, Pooling and Normalize"
        )
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") is True:
        raise _refused(path, "config.json", "its tokens attend to those behind them", "causal attention")
    file = f"{folders[1]}/config.json"
    pooling = read(file)
    if not isinstance(pooling, dict):
        raise CheckpointError(
            f"{path / file} is not there, or no object", "modules.json names it", "download the whole model"
        )
    kind = _kind(path, file, pooling)
    return Pooling(kind, normalised=len(names) == 3, prompt=_prompt(path, read, pooling))


def _modules(path: Path, modules: Any) -> tuple[list[str], list[str]]:
    """Class names, without their packages, and folders."""
    listed: list[Any] = modules if isinstance(modules, list) else [None]
    if not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path"), str) for m in listed
    ):
        raise _refused(path, "modules.json", "it is no list of types and paths", "the form of sentence-transformers")
    return [module["type"].rpartition(".")[2] for module in listed], [module["path"] for module in listed]


def _kind(path: Path, file: str, pooling: Mapping[str, Any]) -> Literal["last", "cls", "mean"]:
    named = pooling.get("pooling_mode")
    modes: Sequence[Any] = (
        [named] if named is not None else [mode for flag, mode in _FLAGS.items() if pooling.get(flag)]
    )
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise _refused(
            path, file, f"its pooling is {' with '.join(map(str, modes)) or 'none'}", f"one of {', '.join(_KINDS)}"
        )
    return _KINDS[modes[0]]


def _prompt(path: Path, read: Read, pooling: Mapping[str, Any]) -> str:
    """What the library would put before a text that nobody says anything else of."""
    file = "config_sentence_transformers.json"
    settings = read(file)
    name = settings.get("default_prompt_name") if isinstance(settings, dict) else None
    if name is None:
        return ""
    prompts = settings.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str) or (prompt and pooling.get("include_prompt") is False):
        raise _refused(
            path, file, f"its default prompt {name!r} is missing, or not pooled", "a prompt that is part of the text"
        )
    return prompt


def _refused(path: Path, file: str, found: str, served: str) -> CheckpointError:
    return CheckpointError(
        f"{path} embeds texts in a way that is not served here",
        f"{file}: {found}; served: {served}",
        "use another embedding model",
    )
