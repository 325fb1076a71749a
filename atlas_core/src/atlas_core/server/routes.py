"""The table of routes: what each is called, what runs, and what the API document says of it."""

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from msgspec import Struct, field
from starlette.routing import Match, Route

from atlas_core.server.errors import OPENAI, ErrorFace

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"


class Operation(Struct, frozen=True, kw_only=True):
    """One route and method.

    ``path`` is in Starlette's spelling, ``endpoint`` an async function of a request, or an ASGI application. ``body`` and ``query``
    are the schemas of what it reads, ``example`` a body that it answers; ``answer`` is the schema of what it answers with ``status``, in ``media``. ``events`` is that of
    one event, where it can stream, and ``last`` the data of the one that ends a stream, if that is another. ``also`` has the schemas of further answers that are no errors, by status; ``statuses`` are further ones that only this endpoint knows; those that follow from what it reads
    and needs are added to them (see ``all_statuses``). ``needs_model`` is false where loading makes no difference. ``open`` asks for
    no key, and ``metered`` says whether rate limits count it. ``errors`` is how its errors are told. ``anthropic`` is the schema of the
    answer to requests with the header anthropic-version, where that is another one; their errors are told as Anthropic's.
    ``either`` are the operations of which this one is any, as the body says; what it reads and answers is theirs.
    """

    path: str
    endpoint: Callable[..., object]
    summary: str
    tag: str
    method: str = "GET"
    body: type[Struct] | None = None
    body_optional: bool = False
    example: Mapping[str, Any] | None = None
    query: type[Struct] | None = None
    answer: Any = dict[str, Any]
    status: int = HTTPStatus.OK
    media: str = JSON
    events: Any = None
    last: str | None = None
    also: Mapping[int, Any] = field(default_factory=dict)
    statuses: frozenset[int] = frozenset()
    needs_model: bool = True
    open: bool = False
    metered: bool = True
    errors: ErrorFace = field(default=OPENAI)
    anthropic: Any = None
    either: tuple["Operation", ...] = ()

    @property
    def all_statuses(self) -> list[int]:
        """Every status of an error that it can answer with, ascending."""
        found = {HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, HTTPStatus.INTERNAL_SERVER_ERROR, *self.statuses}
        if not self.open:
            found |= {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
        if self.metered and not self.open:
            found.add(HTTPStatus.TOO_MANY_REQUESTS)
        if self.body is not None:
            found |= {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE}
        if self.query is not None:
            found.add(HTTPStatus.BAD_REQUEST)
        if "{" in self.path:
            found.add(HTTPStatus.NOT_FOUND)
        if self.needs_model:
            found.add(HTTPStatus.SERVICE_UNAVAILABLE)
        for each in self.either:
            found.update(each.all_statuses)
        return sorted({self.errors.status(int(status)) for status in found} - self.also.keys())


class RouteTable:
    """All operations of one application."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.operations = tuple(operations)
        self.routes = [Route(each.path, each.endpoint, methods=[each.method]) for each in self.operations]
        self._plain = {each.path: each for each in reversed(self.operations) if "{" not in each.path}
        pairs = zip(self.routes, self.operations, strict=True)
        self._patterns = [(route, each) for route, each in pairs if "{" in each.path]

    def find(self, path: str) -> Operation | None:
        """An operation at ``path``, whatever its method: what all of a path have in common can be read off it."""
        found = self._plain.get(path)
        if found is not None:
            return found
        scope = {"type": "http", "path": path, "method": ""}
        return next((each for route, each in self._patterns if route.matches(scope)[0] != Match.NONE), None)
