"""The model as clients see it: its names, its text, its defaults. Read beside the engine, which has the weights."""

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from atlas_core.assembly.model import Model, catalogue, open_model
from atlas_core.contracts.checkpoint import TokenizerSource
from atlas_core.contracts.dialect import Dialect
from atlas_core.loading.fetch import resolve_model
from atlas_core.plugins import Registry
from atlas_core.plugins.load import load
from atlas_core.server.ports import ChatTemplate, ServedModel
from atlas_core.server.translate import sampling_defaults
from atlas_core.settings import Settings
from atlas_core.text import template
from atlas_core.text.dialect.choice import Speech, choose
from atlas_core.text.tokenizer import Tokenizer
from atlas_core.vocab.errors import PluginError, UsageError

_LOG = logging.getLogger("atlas.server")


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
        default, with_tools = _templates(settings, source)
        preset = model.preset.winner
        speech, own = speech_of(settings, model, registry, with_tools or default or "")
        if own is not None and settings.chat_template is None:
            default, with_tools = own, None
        return ServedModel(
            names=settings.served_model_name or (settings.model or "",),
            tokenizer=Tokenizer(source),
            template=_compiled(default, source),
            created=int(time.time()),
            sampling=sampling_defaults(model.checkpoint.generation_config, preset, settings),
            tool_template=_compiled(with_tools, source),
            speech=speech,
            thinking=not settings.disable_thinking,
            thinking_budget=settings.max_thinking_budget,
            pooling=model.pooling,
        )
    finally:
        model.checkpoint.close()


def speech_of(settings: Settings, model: Model, registry: Registry, template: str) -> tuple[Speech, str | None]:
    """How the model writes calls and thoughts, and the dialect's own chat template, if it has one. Raises AtlasError."""
    declared = registry.models.require(model.family)
    preset = model.preset.winner
    advised = (
        (preset and preset.tool_call_parser) or declared.tool_call_parser,
        (preset and preset.reasoning_parser) or declared.reasoning_parser,
    )
    named = settings.tool_call_parser, settings.reasoning_parser, *advised
    known = dialects(registry, [name for name in named if name])
    speech = choose(
        known, template, tools=(settings.tool_call_parser or "", advised[0]),
        reasoning=(settings.reasoning_parser or "", advised[1]),
    )  # fmt: skip
    return speech, known[speech.tool_dialect].chat_template


def explained_speech(settings: Settings, model: Model, registry: Registry) -> Speech:
    """How the model writes calls and thoughts, with the reasons. Raises AtlasError."""
    default, with_tools = _templates(settings, model.checkpoint.tokenizer())
    return speech_of(settings, model, registry, with_tools or default or "")[0]


def dialects(registry: Registry, named: Collection[str] = ()) -> dict[str, Dialect]:
    """Every dialect that an installed plugin brings; one that does not load is left out with a warning.

    Raises PluginError when it, or one whose plugin is broken, is among those ``named``.
    """
    for record in registry.records:
        if record.group == "atlas.dialects" and record.status != "ok" and record.key in named:
            registry.dialects.require(record.key)
    found: dict[str, Dialect] = {}
    for name, declared in registry.dialects.items():
        try:
            found[name] = load(declared.dialect, registry.dialects.owner(name).dist)()
        except PluginError as error:
            if name in named:
                raise
            _LOG.warning("the dialect %s is left out: %s", name, error)
    return found


def _templates(settings: Settings, source: TokenizerSource) -> tuple[str | None, str | None]:
    """The template, and the one for requests with tools if there is such a one: the operator's (a file, or its text), else the checkpoint's."""
    override = settings.chat_template
    if override is None:
        return source.chat_templates.get("default"), source.chat_templates.get("tool_use")
    if "{" in override:
        return override, None
    try:
        return Path(override).read_text(encoding="utf-8"), None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the chat template {override} cannot be read", str(error), "name a file, or give the template"
        ) from error


def _compiled(text: str | None, source: TokenizerSource) -> ChatTemplate | None:
    return None if text is None else template.ChatTemplate(text, source.special, strftime=time.strftime)
