"""The application: routes, and the layers around them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from difflib import get_close_matches
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from atlas_core import __version__
from atlas_core.server import shapes
from atlas_core.server.absent import absent
from atlas_core.server.auth import KeyGuard, RateGuard
from atlas_core.server.background import in_background
from atlas_core.server.boundary import PROCESSING, Boundary, Tracing, json_response, record_of
from atlas_core.server.bounds import Bounds
from atlas_core.server.browsers import BrowserGuard
from atlas_core.server.chat import Chat
from atlas_core.server.completions import Completions
from atlas_core.server.embeddings import Embeddings
from atlas_core.server.endpoint import Generation, Shared
from atlas_core.server.health import Health
from atlas_core.server.info import Info
from atlas_core.server.invocations import Invocations
from atlas_core.server.keys import KeyRing
from atlas_core.server.lifecycle import Lifecycle
from atlas_core.server.limits import Gate
from atlas_core.server.messages import routes as messages
from atlas_core.server.metrics import CONTENT_TYPE, Metrics
from atlas_core.server.models import Models
from atlas_core.server.openapi import document
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import BringUp, Reporter
from atlas_core.server.rates import RateLimiter
from atlas_core.server.responses.jobs import Jobs
from atlas_core.server.responses.routes import operations as responses
from atlas_core.server.routes import TEXT, Operation, RouteTable
from atlas_core.server.schema import ChatRequest, CompletionRequest
from atlas_core.server.store.memory import MemoryStore
from atlas_core.server.store.port import Store, StoreLimits
from atlas_core.server.tokens import Tokens
from atlas_core.server.trial import Trial
from atlas_core.vocab.errors import RequestError

_LAST_TRACES_S = 3.0


class Application:
    """The server without its socket. ``asgi`` is the ASGI application; ``url`` and ``failed`` have to be set before it starts."""

    def __init__(
        self, bring_up: BringUp, options: ServerOptions, reporter: Reporter, store: Store | None = None,
        tracing: Tracing | None = None,
    ) -> None:  # fmt: skip
        """``bring_up`` runs in the background once the application has started; until then every request is answered 503.

        ``store`` and ``tracing`` are closed at the end; without a store, responses and conversations are kept in memory.
        Raises UsageError for options that cannot be used.
        """
        self.options = options
        self.lifecycle = Lifecycle(bring_up, reporter)
        self.gate = Gate()
        self._metrics = Metrics(self.lifecycle, self.gate, options.metrics_aliases)
        self.url = ""
        self.failed: Callable[[], None] = _nothing
        self._described: Response | None = None
        self._store = store or MemoryStore(StoreLimits(), time.time)
        self._jobs = Jobs()
        self._tracing = tracing
        shared = Shared(self.lifecycle, self.gate, self._metrics, options)
        self.keys = KeyRing(options.api_keys, options.api_keys_file)
        self.table = RouteTable(self._operations(shared))
        app = Starlette(
            routes=self.table.routes,
            middleware=self._layers(shared),
            exception_handlers={HTTPException: _refused_by_router},
            lifespan=self._lifespan,
        )
        # A path with a slash too many does not exist; a redirect would lose the body of a POST in many clients.
        app.router.redirect_slashes = False
        self.asgi: ASGIApp = app

    def _layers(self, shared: Shared) -> list[Middleware]:
        """From the outside in."""
        options, table, clock = self.options, self.table, shared.clock
        layers = [
            Middleware(
                Boundary,
                table=table,
                metrics=self._metrics,
                clock=clock,
                json_logs=options.json_logs,
                tracing=self._tracing,
            ),
            Middleware(Bounds, body_timeout=options.body_timeout, clock=clock),
            Middleware(KeyGuard, keys=self.keys, table=table),
        ]
        if not self.keys.asks:
            layers.append(
                Middleware(BrowserGuard, origins=options.cors_origins, table=table, loopback=options.loopback)
            )
        if options.rates.requests is not None or options.rates.tokens is not None:
            layers.append(Middleware(RateGuard, limiter=RateLimiter(options.rates), table=table, clock=clock))
        if options.cors_origins:
            # Outermost: preflights carry no key, and pages must be able to read errors too.
            layers.insert(
                0,
                Middleware(
                    CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["GET", "POST", "DELETE"],
                    allow_headers=["*"], expose_headers=EXPOSED_HEADERS, allow_private_network=True,
                ),
            )  # fmt: skip
        return layers

    async def drain(self) -> None:
        """Refuse new requests, let the running ones finish within ``drain_timeout``, then end the engine."""
        await self.lifecycle.drain(self.options.drain_timeout, self.gate.emptied())

    def _operations(self, shared: Shared) -> list[Operation]:
        """Every route.

        To add some, append a group here. An Operation names what it reads (``body``, ``query``), what it answers (``answer``, ``events``)
        and which statuses only it has; authentication, limits, errors, metrics and the API document follow from that.
        """
        kept = responses(shared, self._store, self._jobs)
        asked = [*_generation(shared), *Embeddings(shared).operations()]
        return [
            *asked,
            Invocations(asked, shared).operation(),
            *kept,
            *messages.operations(shared),
            *Models(self.lifecycle).operations(),
            *Tokens(shared).operations(),
            *Trial(shared).operations(),
            *self._own(),
        ]

    def _own(self) -> list[Operation]:
        return [
            *Health(self.lifecycle).operations(),
            *Info(self.lifecycle, self.options).operations(),
            Operation(
                path="/metrics", endpoint=self._scrape, summary="Metrics in the Prometheus text format", tag="Server",
                media=TEXT, needs_model=False, metered=False, open=self.options.public_metrics,
            ),
            Operation(
                path="/openapi.json", endpoint=self._document, summary="This document", tag="Server", needs_model=False,
                metered=False,
            ),
        ]  # fmt: skip

    async def _scrape(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _document(self, request: Request) -> Response:
        if self._described is None:
            self._described = json_response(document(self.table, __version__, keyed=self.keys.asks))
        return self._described

    def _lifespan(self, app: Starlette) -> AbstractAsyncContextManager[None]:
        @asynccontextmanager
        async def life() -> AsyncIterator[None]:
            self.lifecycle.start(self.url, self.failed)
            try:
                yield
            finally:
                await self.lifecycle.close()
                await self._jobs.close()
                await self._store.close()
                if self._tracing is not None:
                    # A collector that does not answer must not hold up the end.
                    closing = asyncio.ensure_future(in_background(self._tracing.close))
                    await asyncio.wait({closing}, timeout=_LAST_TRACES_S)

        return life()


def _generation(shared: Shared) -> list[Operation]:
    return [
        Operation(
            path="/v1/chat/completions", method="POST", endpoint=Generation(Chat(shared.options.reasoning_names), shared), summary="Answer a conversation",
            tag="Generation", body=ChatRequest, example={"messages": [{"role": "user", "content": "What is gravity?"}]}, answer=shapes.ChatCompletion, events=shapes.ChatCompletionChunk, last="[DONE]",
            statuses=GENERATION_STATUSES,
        ),
        Operation(
            path="/v1/completions", method="POST", endpoint=Generation(Completions(), shared), summary="Go on with a text",
            tag="Generation", body=CompletionRequest, example={"prompt": "The sky is", "max_tokens": 16}, answer=shapes.TextCompletion, events=shapes.TextCompletion, last="[DONE]",
            statuses=GENERATION_STATUSES,
        ),
    ]  # fmt: skip


_RATES = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]
EXPOSED_HEADERS = ["x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry", PROCESSING, *_RATES]
"""Headers that scripts of other origins may read."""

GENERATION_STATUSES = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS})
"""What an endpoint that generates may answer beside the usual: no such model, and no room."""


def _nothing() -> None:
    return None


async def _refused_by_router(request: Request, error: Exception) -> Response:
    """Raises: what the router refuses is told like every other error."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path[:128]
    known = absent(request.url.path) if error.status_code == HTTPStatus.NOT_FOUND else None
    if known is not None:
        raise known
    if error.status_code == HTTPStatus.NOT_FOUND:
        near = get_close_matches(path, [route.path for route in request.app.routes], n=1, cutoff=0.8)
        cure = f"did you mean {near[0]}?" if near else "GET /openapi.json lists what there is"
        raise RequestError(f"there is no {path} here", "", cure, kind="not_found", code="unknown_path")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        record_of(request.scope).headers["allow"] = allowed
        raise RequestError(f"{path} takes no {request.method[:16]}", f"it takes {allowed}", "", kind="not_allowed")
    raise error
