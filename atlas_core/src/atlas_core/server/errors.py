"""Errors as answers: one table from AtlasError to status and OpenAI error object."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from atlas_core.vocab.errors import AtlasError, EngineError, RequestError


@dataclass(frozen=True, slots=True)
class Answer:
    """``retry_after`` are seconds; ``final`` tells SDKs, which retry every 5xx, that trying again is of no use."""

    status: int
    type: str
    code: str | None = None
    retry_after: float | None = None
    final: bool = False


TABLE: Mapping[str, Answer] = MappingProxyType(
    {
        "RequestError.invalid": Answer(400, "invalid_request_error"),
        "RequestError.unsupported": Answer(400, "invalid_request_error", "unsupported"),
        "RequestError.unauthorized": Answer(401, "authentication_error", "invalid_api_key"),
        "RequestError.not_found": Answer(404, "not_found_error", "not_found"),
        "RequestError.too_large": Answer(413, "invalid_request_error", "body_too_large"),
        "RequestError.overloaded": Answer(429, "rate_limit_error", "overloaded", retry_after=1.0),
        "EngineError.loading": Answer(503, "server_error", "loading", retry_after=5.0),
        "EngineError.draining": Answer(503, "server_error", "draining", retry_after=5.0),
        "EngineError.faulted": Answer(503, "server_error", "faulted", final=True),
        "EngineError.gone": Answer(503, "server_error", "gone", final=True),
        "AtlasError": Answer(500, "server_error", "internal_error"),
    }
)
"""By class and kind or state. Whatever is not listed is the last row: the server's fault, not the client's."""


def answer_to(error: AtlasError) -> Answer:
    """The row of ``error``, with the error's own code and delay where it has them."""
    if isinstance(error, RequestError):
        row = TABLE.get(f"RequestError.{error.kind}", TABLE["AtlasError"])
        delay = row.retry_after if error.retry_after is None else error.retry_after
        return Answer(row.status, row.type, error.code or row.code, delay, row.final)
    if isinstance(error, EngineError):
        return TABLE.get(f"EngineError.{error.state}", TABLE["AtlasError"])
    return TABLE["AtlasError"]


def error_object(error: AtlasError) -> dict[str, Any]:
    """The body: ``{"error": {message, type, param, code}}``. The message is what, why and cure in one line."""
    answer = answer_to(error)
    param = error.field if isinstance(error, RequestError) else None
    return {"error": {"message": one_line(error), "type": answer.type, "param": param, "code": answer.code}}


def error_headers(answer: Answer) -> dict[str, str]:
    """Headers beside the body: when to come back, or not to."""
    headers = {}
    if answer.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(answer.retry_after)))
    if answer.final:
        headers["x-should-retry"] = "false"
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def one_line(error: AtlasError) -> str:
    """``what: why (cure)``."""
    text = f"{error.what}: {error.why}" if error.why else error.what
    return f"{text} ({error.cure})" if error.cure else text


def internal_error(request_id: str) -> AtlasError:
    """What a client learns of a defect of the server: nothing but where to look."""
    return AtlasError("the server failed on this request", "", f"its log has the details under request id {request_id}")
