"""Errors as answers: one table from AtlasError to status, and the ways in which families of endpoints tell them."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from atlas_core.vocab.errors import AtlasError, EngineError, RequestError


class Answer(Struct, frozen=True):
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
        "RequestError.forbidden": Answer(403, "permission_error", "forbidden"),
        "RequestError.not_found": Answer(404, "not_found_error", "not_found"),
        "RequestError.not_allowed": Answer(405, "invalid_request_error", "method_not_allowed"),
        "RequestError.too_slow": Answer(408, "invalid_request_error", "request_timeout"),
        "RequestError.too_large": Answer(413, "invalid_request_error", "body_too_large"),
        "RequestError.headers_too_large": Answer(431, "invalid_request_error", "headers_too_large"),
        "RequestError.not_implemented": Answer(501, "invalid_request_error", "not_implemented", final=True),
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
        headers["retry-after-ms"] = str(math.ceil(1000 * answer.retry_after))
    if answer.final:
        headers["x-should-retry"] = "false"
    if answer.status == 408:
        headers["connection"] = "close"
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


class ErrorDetail(Struct):
    """What went wrong. ``param`` is the path of the offending field, ``code`` a stable word."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """An error as OpenAI's endpoints tell it."""

    error: ErrorDetail


class ErrorFace(Struct, frozen=True):
    """How one family of endpoints tells errors.

    ``schema`` describes what ``body`` makes of an error and the request's id. ``status`` maps a status of the table to the family's own,
    and ``headers`` has those that the id goes into.
    """

    schema: type[Struct]
    body: Callable[[AtlasError, str], Mapping[str, Any]]
    status: Callable[[int], int] = int
    headers: tuple[str, ...] = ("x-request-id",)


OPENAI = ErrorFace(ErrorBody, lambda error, request_id: error_object(error))


class AnthropicReason(Struct):
    """``error_code`` is a stable word; ``unsupported`` names the fields that this server does not have."""

    error_code: str
    unsupported: list[str] | UnsetType = UNSET


class AnthropicDetail(Struct):
    """What went wrong."""

    type: str
    message: str
    details: AnthropicReason | UnsetType = UNSET


class AnthropicBody(Struct):
    """An error as Anthropic's endpoints tell it."""

    type: Literal["error"]
    error: AnthropicDetail
    request_id: str | None


ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
        413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    }
)  # fmt: skip
"""By status. Any other 4xx is the client's fault too, and any other 5xx the server's."""


def anthropic_error(error: AtlasError, request_id: str | None = None) -> dict[str, Any]:
    """``{"type": "error", "error": {type, message, details}, "request_id"}``."""
    answer = answer_to(error)
    kind = ANTHROPIC_TYPES.get(answer.status, "invalid_request_error" if answer.status < 500 else "api_error")
    if isinstance(error, EngineError) and error.state in ("loading", "draining"):
        kind = "overloaded_error"  # clients try again
    detail: dict[str, Any] = {"type": kind, "message": one_line(error)}
    if answer.code is not None:
        detail["details"] = {"error_code": answer.code}
        if isinstance(error, RequestError) and error.kind == "unsupported" and error.field is not None:
            detail["details"]["unsupported"] = [error.field]
    return {"type": "error", "error": detail, "request_id": request_id}


ANTHROPIC = ErrorFace(AnthropicBody, anthropic_error, headers=("request-id", "x-request-id"))


def one_line(error: AtlasError) -> str:
    """``what: why (cure)``."""
    text = f"{error.what}: {error.why}" if error.why else error.what
    return f"{text} ({error.cure})" if error.cure else text


def internal_error(request_id: str) -> AtlasError:
    """What a client learns of a defect of the server: nothing but where to look."""
    return AtlasError("the server failed on this request", "", f"its log has the details under request id {request_id}")
