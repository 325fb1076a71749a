"""The model as clients see it: its names, its text, its defaults. Read beside the engine, which has the weights."""

import time
from collections.abc import Callable
from pathlib import Path

from atlas_core.assembly.model import catalogue, open_model
from atlas_core.contracts.checkpoint import TokenizerSource
from atlas_core.loading.fetch import resolve_model
from atlas_core.plugins import Registry
from atlas_core.server.ports import ChatTemplate, ServedModel
from atlas_core.server.translate import sampling_defaults
from atlas_core.settings import Settings
from atlas_core.text import template
from atlas_core.text.tokenizer import Tokenizer
from atlas_core.vocab.errors import UsageError


def fetch(settings: Settings, registry: Registry, progress: Callable[[int, int, str], None]) -> Path:
    """The checkpoint's path, downloaded if it must be. Raises UsageError or CheckpointError."""
    return resolve_model(
        settings.model or "", catalogue=catalogue(registry), progress=progress, revision=settings.revision
    )


def served_model(settings: Settings, local: Settings, registry: Registry) -> ServedModel:
    """Tokenizer, chat template and sampling defaults; ``local`` are ``settings`` with the model's path. Raises AtlasError."""
    model = open_model(registry, local, lambda done, total, note: None)
    try:
        source = model.checkpoint.tokenizer()
        return ServedModel(
            names=settings.served_model_name or (settings.model or "",),
            tokenizer=Tokenizer(source),
            template=_template(settings, source),
            created=int(time.time()),
            sampling=sampling_defaults(model.checkpoint.generation_config, {}),
        )
    finally:
        model.checkpoint.close()


def _template(settings: Settings, source: TokenizerSource) -> ChatTemplate | None:
    """The operator's template, a file or its text; else the checkpoint's; None when there is neither."""
    override = settings.chat_template
    if override is not None and "{" not in override:
        try:
            override = Path(override).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"the chat template {settings.chat_template} cannot be read",
                str(error),
                "name a file, or give the template",
            ) from error
    if override is None and not source.chat_templates:
        return None
    text = template.choose_template(source, override=override)
    return template.ChatTemplate(text, source.special, strftime=time.strftime)
