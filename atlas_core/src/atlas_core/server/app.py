"""The application: routes, and the layers around them."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atlas_core.server.auth import KeyGuard
from atlas_core.server.boundary import Boundary, error_response, json_response, record_of
from atlas_core.server.chat import Chat
from atlas_core.server.completions import Completions
from atlas_core.server.endpoint import Generation, Shared
from atlas_core.server.health import Health
from atlas_core.server.lifecycle import Lifecycle
from atlas_core.server.limits import Gate
from atlas_core.server.metrics import CONTENT_TYPE, Metrics
from atlas_core.server.models import Models
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import BringUp, Reporter
from atlas_core.server.tokens import Tokens
from atlas_core.vocab.errors import RequestError


class Application:
    """The server without its socket. ``asgi`` is the ASGI application; ``url`` and ``failed`` have to be set before it starts."""

    def __init__(self, bring_up: BringUp, options: ServerOptions, reporter: Reporter) -> None:
        """``bring_up`` runs in the background once the application has started; until then every request is answered 503."""
        self.options = options
        self.lifecycle = Lifecycle(bring_up, reporter)
        self.gate = Gate()
        self._metrics = Metrics(self.lifecycle, self.gate)
        self.url = ""
        self.failed: Callable[[], None] = _nothing
        shared = Shared(self.lifecycle, self.gate, self._metrics, options)
        self.routes = self._routes(shared)
        self.asgi: ASGIApp = Starlette(
            routes=self.routes,
            middleware=[
                Middleware(Boundary, metrics=self._metrics, clock=shared.clock, json_logs=options.json_logs),
                Middleware(KeyGuard, keys=options.api_keys),
            ],
            exception_handlers={HTTPException: _refused_by_router},
            lifespan=self._lifespan,
        )

    async def drain(self) -> None:
        """Refuse new requests, let the running ones finish within ``drain_timeout``, then end the engine."""
        await self.lifecycle.drain(self.options.drain_timeout, self.gate.emptied())

    def _routes(self, shared: Shared) -> list[Route]:
        health = Health(self.lifecycle)
        models = Models(self.lifecycle)
        tokens = Tokens(shared)
        return [
            _route("/v1/chat/completions", Generation(Chat(), shared), "POST"),
            _route("/v1/completions", Generation(Completions(), shared), "POST"),
            _route("/v1/models", models.all),
            _route("/v1/models/{id:path}", models.one),
            _route("/tokenize", tokens.tokenize, "POST"),
            _route("/detokenize", tokens.detokenize, "POST"),
            _route("/health", health.health),
            _route("/live", health.live),
            _route("/metrics", self._scrape),
            _route("/version", health.version),
        ]

    async def _scrape(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    def _lifespan(self, app: Starlette) -> AbstractAsyncContextManager[None]:
        @asynccontextmanager
        async def life() -> AsyncIterator[None]:
            self.lifecycle.start(self.url, self.failed)
            try:
                yield
            finally:
                await self.lifecycle.close()

        return life()


class _Named:
    """Writes the route into the request's record, then runs the endpoint."""

    def __init__(self, path: str, endpoint: ASGIApp) -> None:
        self._path = path
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).endpoint = self._path
        await self._endpoint(scope, receive, send)


def _route(path: str, endpoint: Callable[..., object], method: str = "GET") -> Route:
    route = Route(path, endpoint, methods=[method])
    route.app = _Named(path, route.app)
    return route


def _nothing() -> None:
    return None


async def _refused_by_router(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path[:128]
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(RequestError(f"there is no {path} here", "", "", kind="not_found", code="unknown_path"))
    body = {
        "message": f"{path}: {error.detail}", "type": "invalid_request_error", "param": None,
        "code": HTTPStatus(error.status_code).name.lower(),
    }  # fmt: skip
    return json_response({"error": body}, error.status_code, error.headers)
