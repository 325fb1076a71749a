"""Holds real answers against the API document."""

from typing import Any

import httpx
import jsonschema

from atlas_core.server.openapi import document
from atlas_core.server.routes import RouteTable


class Documented:
    """A hook of httpx clients: an answer that the document does not know of fails the test that asked for it."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        name = tuple((each.path, each.method) for each in table.operations)
        if name not in _DOCUMENTS:
            _DOCUMENTS[name] = document(table, "1", keyed=True)
        self._api = _DOCUMENTS[name]

    def __call__(self, response: httpx.Response) -> None:
        operation = self._table.find(response.request.url.path)
        method = response.request.method.lower()
        if method in ("head", "options"):  # as the framework makes them of the others
            return
        path = operation and operation.path.replace(":path", "")
        if path is None or method not in self._api["paths"][path]:
            assert response.status_code in (401, 404, 405, 429, 431, 501), (
                method,
                response.request.url.path,
                response.status_code,
            )
            return
        known = self._api["paths"][path][method]["responses"]
        assert str(response.status_code) in known, (method, path, response.status_code, response.read())
        content = known[str(response.status_code)]["content"]
        media = response.headers["content-type"].partition(";")[0]
        assert media in content, (method, path, response.status_code, media)
        if media == "application/json":
            response.read()
            validator(self._api["components"], content[media]["schema"]).validate(response.json())

    def event(self, path: str, payload: Any) -> None:
        """Check one event of a stream."""
        content = self._api["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        data = content["schema"]["properties"]["data"]
        schema = data.get("anyOf", [data])[0]["contentSchema"]
        validator(self._api["components"], schema).validate(payload)


_DOCUMENTS: dict[tuple[tuple[str, str], ...], Any] = {}
_VALIDATORS: dict[str, jsonschema.Draft202012Validator] = {}


def validator(components: Any, schema: Any) -> jsonschema.Draft202012Validator:
    name = f"{id(components)} {schema}"
    if name not in _VALIDATORS:
        _VALIDATORS[name] = jsonschema.Draft202012Validator({**schema, "components": components})
    return _VALIDATORS[name]
