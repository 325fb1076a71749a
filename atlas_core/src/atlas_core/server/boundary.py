"""The outermost layer of the application: request ids, errors as answers, one log line and one measurement a request."""

import logging
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atlas_core.server.errors import answer_to, error_headers, error_object, internal_error
from atlas_core.server.metrics import Metrics
from atlas_core.vocab.errors import AtlasError

_LOG = logging.getLogger("atlas.request")
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
PROBES = frozenset({"/health", "/live", "/metrics"})
CLIENT_GONE = 499
"""Never sent, only written down: the client did not wait for its answer."""


@dataclass(slots=True)
class Record:
    """What is written down about one request; handlers fill in what they learn."""

    id: str
    method: str
    path: str
    endpoint: str = "other"
    status: int = CLIENT_GONE
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


def record_of(scope: Scope) -> Record:
    """The record of the request that ``scope`` belongs to."""
    record: Record = scope["state"]["record"]
    return record


class Boundary:
    """ASGI middleware. Nothing that an application raises gets past it, but cancellation."""

    def __init__(self, app: ASGIApp, metrics: Metrics, clock: Callable[[], float], *, json_logs: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._write = _as_json if json_logs else _as_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(_request_id(Headers(scope=scope)), scope["method"], scope["path"])
        scope.setdefault("state", {})["record"] = record
        started = self._clock()
        sent = False

        async def send_with_id(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = True
                record.status = message["status"]
                MutableHeaders(raw=message.setdefault("headers", []))["x-request-id"] = record.id
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
                await error_response(error)(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 nothing may get past, see above
            record.error = type(error).__name__
            _LOG.error("request %s failed", record.id, exc_info=error)
            if not sent:
                await error_response(internal_error(record.id))(scope, receive, send_with_id)
        finally:
            record.seconds = self._clock() - started
            self._metrics.request(record.endpoint, record.status, record.seconds)
            # Probes come every few seconds and would bury the requests.
            _LOG.log(logging.DEBUG if record.endpoint in PROBES else logging.INFO, "%s", self._write(record))


def error_response(error: AtlasError) -> Response:
    """The answer to a request that failed with ``error``."""
    answer = answer_to(error)
    return json_response(error_object(error), answer.status, error_headers(answer))


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``body`` as JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    # Anything else could put lines of its own into the log.
    return given if _GIVEN_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _as_text(record: Record) -> str:
    line = f"{record.method} {_printable(record.path)} {record.status} {record.seconds * 1000:.0f}ms"
    if record.completion_tokens or record.prompt_tokens:
        line += f" prompt={record.prompt_tokens} completion={record.completion_tokens}"
    line += f" id={record.id}"
    return line + (f" error={_printable(record.error)!r}" if record.error else "")


def _as_json(record: Record) -> str:
    return msgspec.json.encode(record).decode()


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:200])
