"""``atlas serve``: bind, fetch, start the engine process, answer."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atlas_core.assembly.model import catalogue, open_model
from atlas_core.assembly.settings import encode_settings
from atlas_core.contracts.checkpoint import TokenizerSource
from atlas_core.engine.client import ProcessClient
from atlas_core.loading.fetch import resolve_model
from atlas_core.plugins import Registry
from atlas_core.server.app import Application
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import ChatTemplate, OnProgress, Reporter, ServedModel, Service
from atlas_core.server.run import bind_socket, run
from atlas_core.server.translate import sampling_defaults
from atlas_core.settings import Settings
from atlas_core.text import template
from atlas_core.text.tokenizer import Tokenizer
from atlas_core.vocab.errors import UsageError
from atlas_core.vocab.messages import Progress

_BUILD = "atlas_core.assembly.engine:build_engine"


def serve(settings: Settings, registry: Registry, reporter: Reporter) -> int:
    """Serve until told to end; returns the exit code. The port is taken before anything is read.

    Raises AtlasError for whatever makes serving impossible.
    """
    if not settings.model:
        raise UsageError("no model is named", "a server serves one", "atlas serve MODEL; try atlas serve smollm2")
    listener = bind_socket(settings.bind, settings.port)
    options = ServerOptions(
        api_keys=settings.api_key, max_queue=settings.max_queue, max_body=settings.max_body,
        drain_timeout=settings.drain_timeout,
    )  # fmt: skip
    application = Application(lambda progress: bring_up(settings, registry, progress), options, reporter)
    return run(application, listener, log_level=settings.log_level)


async def bring_up(settings: Settings, registry: Registry, on_progress: OnProgress) -> Service:
    """Fetch the model, then start the engine while the tokenizer is read here. Raises AtlasError; leaves nothing behind."""
    loop = asyncio.get_running_loop()

    def progress(done: int, total: int, note: str) -> None:
        loop.call_soon_threadsafe(on_progress, Progress("fetch", done, total, note))

    path = await asyncio.to_thread(_fetch, settings, registry, progress)
    local = replace(settings, model=str(path), revision=None)
    client = ProcessClient(_BUILD, encode_settings(local))
    text = asyncio.ensure_future(asyncio.to_thread(_served, settings, local, registry))
    try:
        await client.start(on_progress)
        return Service(client, await text)
    except BaseException:
        await client.close()
        await asyncio.gather(text, return_exceptions=True)
        raise


def _fetch(settings: Settings, registry: Registry, progress: Callable[[int, int, str], None]) -> Path:
    return resolve_model(
        settings.model or "", catalogue=catalogue(registry), progress=progress, revision=settings.revision
    )


def _served(settings: Settings, local: Settings, registry: Registry) -> ServedModel:
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
