"""``atlas serve``: bind, fetch, start the engine process, answer."""

import asyncio
import gc
import socket
import time

from msgspec.structs import replace

from atlas_core.assembly.served import fetch, served_model
from atlas_core.assembly.settings import engine_settings
from atlas_core.engine.child import EngineProcess
from atlas_core.engine.client import ProcessClient
from atlas_core.plugins import Registry
from atlas_core.server.app import Application
from atlas_core.server.background import in_background
from atlas_core.server.embedder import EngineEmbedder
from atlas_core.server.listen import is_loopback
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import OnProgress, Reporter, ServedModel, Service
from atlas_core.server.run import check_tls, run
from atlas_core.server.store.opening import open_store
from atlas_core.server.store.port import StoreLimits
from atlas_core.server.tracing import open_telemetry
from atlas_core.settings import Settings
from atlas_core.vocab.errors import UsageError
from atlas_core.vocab.messages import Progress

_DAY_S = 86_400.0
_BUILD = "atlas_core.assembly.engine:build_engine"


def serve(
    settings: Settings, registry: Registry, reporter: Reporter, engine: EngineProcess, listener: socket.socket
) -> int:
    """Serve until told to end; returns the exit code. ``engine`` waits for its orders; ``listener`` is the port.

    Raises AtlasError for whatever makes serving impossible.
    """
    if not settings.model:
        raise UsageError("no model is named", "a server serves one", "atlas serve MODEL; try atlas serve smollm2")
    options = replace(ServerOptions.of(settings), loopback=is_loopback(listener))
    if options.tls is not None:
        check_tls(*options.tls)
    limits = StoreLimits(settings.store_max_entries, settings.store_max_bytes, settings.store_retention * _DAY_S)
    store = open_store(settings.store, limits)
    tracing = None if settings.otlp_endpoint is None else open_telemetry(settings.otlp_endpoint)
    application = Application(
        lambda progress: bring_up(settings, registry, engine, progress), options, reporter, store, tracing
    )
    if not application.keys.asks and not options.loopback:
        reporter.notice(
            f"warning: anybody who reaches {settings.bind} port {listener.getsockname()[1]} can use this server, for it asks for no "
            "key (--api-keys-file)"
        )
    return run(application, listener, log_level=settings.log_level)


def _service(client: ProcessClient, model: ServedModel) -> Service:
    pooling = model.pooling
    if pooling is None:
        return Service(client, model)
    embedder = EngineEmbedder(client, time.monotonic, normalised=pooling.normalised, prompt=pooling.prompt)
    return Service(client, model, embedder)


async def bring_up(settings: Settings, registry: Registry, engine: EngineProcess, on_progress: OnProgress) -> Service:
    """Fetch the model, then have the engine load it while the tokenizer is read here. Raises AtlasError; leaves nothing behind."""
    loop = asyncio.get_running_loop()

    def progress(done: int, total: int, note: str) -> None:
        loop.call_soon_threadsafe(on_progress, Progress("fetch", done, total, note))

    path = await in_background(lambda: fetch(settings, registry, progress))
    local = replace(settings, model=str(path), revision=None)
    client = ProcessClient(_BUILD, engine_settings(settings, path), process=engine)
    text = asyncio.ensure_future(in_background(lambda: served_model(settings, local, registry)))
    try:
        await client.start(on_progress)
        service = _service(client, await text)
    except BaseException:
        await client.close()
        await asyncio.gather(text, return_exceptions=True)
        raise
    # What is there now stays: collections need not walk it, which would hold up every stream.
    gc.freeze()
    return service
