"""Who may ask, and how often: every path wants a key, but those that say whether the server lives."""

from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from atlas_core.server.boundary import noting, record_of
from atlas_core.server.keys import Key, KeyRing
from atlas_core.server.rates import RateLimiter
from atlas_core.server.routes import RouteTable
from atlas_core.vocab.errors import RequestError


class KeyGuard:
    """ASGI middleware. Closed by default: a path that nobody thought of, or that does not exist, asks for a key too.

    The key that let a request in stands in its scope's state as ``key``.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, table: RouteTable) -> None:
        """``keys`` that ask for none leave everything open."""
        self._app = app
        self._keys = keys
        self._open = frozenset(each.path for each in table.operations if each.open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with the key's name in its record. Raises RequestError of kind unauthorized."""
        if self._keys.asks and scope["type"] == "http" and scope["path"] not in self._open:
            key = self._check(Headers(scope=scope))
            record_of(scope).key = key.name
            scope["state"]["key"] = key
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> Key:
        given = given_keys(headers)
        if not given:
            raise RequestError(
                "this server asks for an API key", "the request has none",
                "send it as Authorization: Bearer KEY, or as x-api-key", kind="unauthorized", code="missing_api_key",
            )  # fmt: skip
        key = self._keys.find(given)
        if key is None:
            raise RequestError("the API key is not valid", "this server does not know it", "", kind="unauthorized")
        return key


def given_keys(headers: Headers) -> list[str]:
    """The keys that a request carries, unchecked: that of ``Authorization: Bearer`` first, then that of ``x-api-key``."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    return given + ([headers["x-api-key"]] if "x-api-key" in headers else [])


class RateGuard:
    """ASGI middleware, inside the KeyGuard: limits are those of a key, or of an address where no keys are asked for.

    ``charge`` in a scope's state counts the tokens of what outlives its request.
    """

    def __init__(self, app: ASGIApp, limiter: RateLimiter, table: RouteTable, clock: Callable[[], float]) -> None:
        self._app = app
        self._limiter = limiter
        self._free = frozenset(each.path for each in table.operations if each.open or not each.metered)
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count it. Raises RequestError of kind overloaded."""
        if scope["type"] != "http" or scope["path"] in self._free:
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        client = record.key or _address(scope)
        verdict = self._limiter.admit(client, self._clock())
        record.headers |= verdict.headers
        if verdict.wait:
            raise RequestError(
                f"there are too many {verdict.limit} a minute", "this server limits what one client may ask for",
                f"come again in {verdict.wait:.1f} s", kind="overloaded", code="rate_limit_exceeded", retry_after=verdict.wait,
            )  # fmt: skip

        def charge(tokens: int) -> None:
            self._limiter.charge(client, tokens, self._clock())

        charged = 0

        def settle() -> None:
            nonlocal charged
            due = record.prompt_tokens + record.completion_tokens
            charge(due - charged)
            charged = due

        scope["state"]["charge"] = charge
        try:
            # Its next request may be here before the application returns.
            await self._app(scope, receive, noting(send, settle))
        finally:
            settle()


def _address(scope: Scope) -> str:
    """The client's address; of IPv6 the network, since one machine has all of it."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(IPv6Address(int(address) >> 64 << 64)) if isinstance(address, IPv6Address) else host
