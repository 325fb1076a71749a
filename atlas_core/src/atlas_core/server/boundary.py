"""The outermost layer of the application: request ids, errors as answers, one log line and one measurement a request."""

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import Struct, field
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas_core.server.errors import ANTHROPIC, OPENAI, ErrorFace, answer_to, error_headers, internal_error
from atlas_core.server.logs import REQUESTS
from atlas_core.server.metrics import Metrics
from atlas_core.server.routes import JSON, RouteTable
from atlas_core.vocab.errors import AtlasError

_LOG = logging.getLogger(REQUESTS)
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
READINESS = ("/health", "/ready", "/health/ready", "/ping")
LIVENESS = ("/live", "/health/live")
"""Each under the names by which orchestrators and other servers know it, its own first."""
PROBES = frozenset({*READINESS, *LIVENESS, "/metrics"})
PROCESSING = "openai-processing-ms"
"""Milliseconds from the head of a request to that of its answer, under the name that OpenAI's clients write into their logs."""
CLIENT_GONE = 499
"""Never sent, only written down: the client did not wait for its answer."""


class Record(Struct):
    """What is written down about one request; handlers fill in what they learn.

    ``key`` names the client's API key, and is no secret. ``model`` is the one that answers, ``requested`` what the client called it. ``first_token`` are seconds from the head of the request. ``errors`` is how this
    endpoint tells errors; ``headers`` go into the answer, whatever it is.
    """

    id: str
    method: str
    path: str
    endpoint: str = "other"
    key: str = ""
    model: str = ""
    requested: str = ""
    stream: bool = False
    status: int = CLIENT_GONE
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    finish: tuple[str, ...] = ()
    error: str | None = None
    errors: ErrorFace = OPENAI
    headers: dict[str, str] = field(default_factory=dict)


def record_of(scope: Scope) -> Record:
    """The record of the request that ``scope`` belongs to."""
    record: Record = scope["state"]["record"]
    return record


def noting(send: Send, note: Callable[[], None]) -> Send:
    """``send`` that calls ``note`` before the last byte of an answer: what a client has, is counted."""

    async def noted(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            note()
        await send(message)

    return noted


class Tracing(Protocol):
    """Is told of every request when it has ended."""

    def finished(self, record: Record, headers: Mapping[str, str], ended: int) -> None:
        """``record`` is complete; ``headers`` are the request's, with lower-case names; ``ended`` is Unix time, nanoseconds."""
        ...

    def close(self) -> None:
        """Send what is left; may block for seconds."""
        ...


class Boundary:
    """ASGI middleware. Nothing that an application raises gets past it, but cancellation."""

    def __init__(
        self, app: ASGIApp, table: RouteTable, metrics: Metrics, clock: Callable[[], float], *, json_logs: bool,
        tracing: Tracing | None = None,
    ) -> None:  # fmt: skip
        self._app = app
        self._table = table
        self._metrics = metrics
        self._clock = clock
        self._tracing = tracing
        self._write = _as_json if json_logs else _as_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = Record(_request_id(headers), scope["method"], scope["path"])
        operation = self._table.find(record.path)
        if operation is not None:
            record.endpoint, record.errors = operation.path, operation.errors
        if "anthropic-version" in headers:
            record.errors = ANTHROPIC  # of paths that both speak, and of those that do not exist
        scope.setdefault("state", {})["record"] = record
        started = self._clock()
        sent = False

        async def send_with_id(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = True
                record.status = message["status"]
                answered = MutableHeaders(raw=message.setdefault("headers", []))
                for name in record.errors.headers:
                    answered[name] = record.id
                if record.path.startswith("/v1/"):
                    answered[PROCESSING] = str(round(1000 * (self._clock() - started)))
                answered.update(record.headers)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            record.error = "client went away"
        except AtlasError as error:
            record.error = error.what
            if answer_to(error).status == 500:
                _LOG.error("request %s failed", record.id, exc_info=error)
            if not sent:
                await error_response(error, record)(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 nothing may get past, see above
            record.error = type(error).__name__
            _LOG.error("request %s failed", record.id, exc_info=error)
            if not sent:
                await error_response(internal_error(record.id), record)(scope, receive, send_with_id)
        finally:
            record.seconds = self._clock() - started
            self._metrics.request(record.endpoint, record.status, record.seconds)
            if self._tracing is not None:
                self._tracing.finished(record, headers, time.time_ns())
            # Probes come every few seconds and would bury the requests.
            _LOG.log(logging.DEBUG if record.endpoint in PROBES else logging.INFO, "%s", self._write(record))


def error_response(error: AtlasError, record: Record) -> Response:
    """The answer to the request of ``record``, which failed with ``error``."""
    answer = answer_to(error)
    body = record.errors.body(error, record.id)
    return json_response(body, record.errors.status(answer.status), error_headers(answer))


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``body`` as JSON."""
    return Response(msgspec.json.encode(body), status, headers, JSON)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    # Anything else could put lines of its own into the log.
    return given if _GIVEN_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _as_text(record: Record) -> str:
    line = f"{record.method} {_printable(record.path)} {record.status} {record.seconds * 1000:.0f}ms"
    if record.completion_tokens or record.prompt_tokens:
        line += f" prompt={record.prompt_tokens} cached={record.cached_tokens} completion={record.completion_tokens}"
    if record.first_token is not None:
        line += f" ttft={record.first_token * 1000:.0f}ms"
    for name, value in (("finish", ",".join(record.finish)), ("model", record.model), ("key", record.key)):
        line += f" {name}={_printable(value)}" if value else ""
    line += f" id={record.id}"
    return line + (f" error={_printable(record.error)!r}" if record.error else "")


_LOGGED = (
    "id", "method", "path", "endpoint", "key", "model", "stream", "status", "seconds", "first_token", "prompt_tokens",
    "cached_tokens", "completion_tokens", "finish", "error",
)  # fmt: skip


def _as_json(record: Record) -> str:
    return msgspec.json.encode({name: getattr(record, name) for name in _LOGGED}).decode()


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:200])
