"""Web pages must not use a server that asks for no key: any page that somebody on this machine visits could reach it."""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from atlas_core.server.routes import RouteTable
from atlas_core.vocab.errors import RequestError


class BrowserGuard:
    """ASGI middleware for servers without keys.

    Browsers name the page in ``Origin``: one that is not allowed could not read the answer, but would have it computed. On a
    loopback address ``Host`` must not be a name either, since whoever owns a name may have it point here after the page was loaded.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], table: RouteTable, *, loopback: bool) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._open = frozenset(each.path for each in table.operations if each.open)
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises RequestError of kind forbidden."""
        if scope["type"] == "http" and scope["path"] not in self._open:
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            if self._loopback and not _harmless(host):
                raise RequestError(
                    f"this server is not to be called {host[:128]}", "it serves its own machine and asks for no key",
                    "call it localhost, or start it with --api-key", kind="forbidden", code="host_not_allowed",
                )  # fmt: skip
            origin = headers.get("origin")
            if origin is not None and not self._may(origin, f"{scope['scheme']}://{host}"):
                raise RequestError(
                    f"pages of {origin[:128]} may not use this server", "it asks for no key",
                    "start it with --cors-origin for that origin, or with --api-key", kind="forbidden", code="origin_not_allowed",
                )  # fmt: skip
        await self._app(scope, receive, send)

    def _may(self, origin: str, own: str) -> bool:
        return origin == own or "*" in self._origins or origin in self._origins


def _harmless(host: str) -> bool:
    """Whether ``host``, of a Host header, is no name that somebody else could own."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
