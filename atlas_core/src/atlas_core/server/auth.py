"""API keys: every path asks for one, but those that say whether the server lives."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from atlas_core.server.routes import RouteTable
from atlas_core.vocab.errors import RequestError


class KeyGuard:
    """ASGI middleware. Closed by default: a path that nobody thought of, or that does not exist, asks for a key too."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], table: RouteTable) -> None:
        """No ``keys``: everything is open."""
        self._open = frozenset(each.path for each in table.operations if each.open)
        self._app = app
        self._keys = [key.encode("utf-8") for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises RequestError of kind unauthorized."""
        if self._keys and scope["type"] == "http" and scope["path"] not in self._open:
            self._check(Headers(scope=scope))
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        given = given_keys(headers)
        if not given:
            raise RequestError(
                "this server asks for an API key", "the request has none",
                "send it as Authorization: Bearer KEY, or as x-api-key", kind="unauthorized", code="missing_api_key",
            )  # fmt: skip
        # Every pair is compared, each in constant time: the time taken tells nothing about the keys.
        matches = [hmac.compare_digest(one.encode("utf-8"), key) for one in given for key in self._keys]
        if not any(matches):
            raise RequestError("the API key is not valid", "this server does not know it", "", kind="unauthorized")


def given_keys(headers: Headers) -> list[str]:
    """The keys that a request carries, unchecked: that of ``Authorization: Bearer`` first, then that of ``x-api-key``."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    return given + ([headers["x-api-key"]] if "x-api-key" in headers else [])
