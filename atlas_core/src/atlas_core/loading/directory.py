"""The text files of a Hugging Face model directory: configuration, generation defaults, tokenizer, chat templates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas_core.contracts.checkpoint import Pooling, TokenizerSource
from atlas_core.loading.files import AGAIN, impostor, unreadable
from atlas_core.loading.pooling import read_pooling
from atlas_core.vocab.errors import CheckpointError

_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model", "tiktoken.model")


class ModelDirectory:
    """A directory with a config.json. Weights need not be there."""

    def __init__(self, path: Path) -> None:
        """Reads the configuration. Raises CheckpointError when it is missing or not valid."""
        self.path = path
        self.config: Mapping[str, Any] = self._object("config.json")
        if not isinstance(self.config.get("model_type"), str):
            raise CheckpointError(
                f"{path / 'config.json'} does not say what model it is", "it has no model_type", "add model_type"
            )
        self.generation_config: Mapping[str, Any] = self._object("generation_config.json", optional=True)
        self.quantization = self._quantization()

    def pooling(self) -> Pooling | None:
        """How the model embeds texts, if it does. Raises CheckpointError."""
        return read_pooling(self.path, self.config, lambda name: self._json(name, optional=True))

    def tokenizer(self) -> TokenizerSource:
        """tokenizer.json with its templates. Raises CheckpointError when there is none."""
        text = self._text("tokenizer.json", optional=True)
        if text is None:
            others = [name for name in _OTHER_TOKENIZERS if (self.path / name).is_file()]
            raise CheckpointError(
                f"{self.path} has no tokenizer.json",
                f"{', '.join(others)} alone cannot be read" if others else "there is no tokenizer of any kind",
                "convert it with the transformers library, or take it from another copy of the model",
            )
        settings = self._object("tokenizer_config.json", optional=True)
        special = _special(self._object("special_tokens_map.json", optional=True)) | _special(settings)
        return TokenizerSource(
            json=text,
            chat_templates=self._templates(settings),
            special=special,
            add_bos=settings.get("add_bos_token") is True,
        )

    def _quantization(self) -> Mapping[str, Any]:
        for key in ("quantization_config", "compression_config"):
            if isinstance(self.config.get(key), dict):
                return dict(self.config[key])
        return self._object("hf_quant_config.json", optional=True)

    def _templates(self, settings: Mapping[str, Any]) -> dict[str, str]:
        templates: dict[str, str] = {}
        declared = settings.get("chat_template")
        if declared is None:
            declared = self._object("chat_template.json", optional=True).get("chat_template")
        if isinstance(declared, str):
            templates["default"] = declared
        elif isinstance(declared, list) and all(
            isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
            for item in declared
        ):
            templates.update({item["name"]: item["template"] for item in declared})
        elif declared is not None:
            raise CheckpointError(
                f"the chat_template in {self.path} is not understood",
                "it is neither a string nor a list of names with templates",
                "give a template with --chat-template",
            )
        # Files win over tokenizer_config.json: newer checkpoints keep their templates there.
        alone = self._text("chat_template.jinja", optional=True)
        if alone is not None:
            templates["default"] = alone
        for file in sorted((self.path / "additional_chat_templates").glob("*.jinja")):
            text = self._text(f"additional_chat_templates/{file.name}", optional=False)
            templates[file.stem] = text or ""
        return templates

    def _text(self, name: str, *, optional: bool) -> str | None:
        path = self.path / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if optional:
                return None
            raise CheckpointError(
                f"{path} does not exist", "a model directory needs it", "download the whole model"
            ) from None
        except OSError as error:
            raise unreadable(path, error) from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not text", str(error), AGAIN) from error

    def _object(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        value = self._json(name, optional=optional)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path / name} is not a JSON object", f"it is {type(value).__name__}", AGAIN)
        return value

    def _json(self, name: str, *, optional: bool) -> Any:
        text = self._text(name, optional=optional)
        if text is None:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            guess = impostor(text[:512].encode("utf-8"))
            raise CheckpointError(f"{self.path / name} is not valid JSON", guess or str(error), AGAIN) from error


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like as strings, from either spelling (a string, or an object with ``content``)."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if not key.endswith("_token"):
            continue
        spelling = value.get("content") if isinstance(value, dict) else value
        if isinstance(spelling, str):
            found[key] = spelling
    return found
