"""The API document: OpenAPI 3.1, made of the route table and the schemas of what endpoints read and answer. Pure."""

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from atlas_core.server.errors import ANTHROPIC
from atlas_core.server.routes import EVENTS, JSON, TEXT, Operation, RouteTable

_REF = "#/components/schemas/{name}"
_SECURITY: Mapping[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_PHRASES: Mapping[int, str] = {status.value: status.phrase for status in HTTPStatus}
_REQUEST_ID = {"description": "The id of the request, as in the server's log.", "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}}


def document(table: RouteTable, version: str, *, keyed: bool) -> dict[str, Any]:
    """The document of the API in ``table``. ``keyed``: requests must have an API key."""
    types = [each for operation in table.operations for each in _types(operation)]
    # Some types are schemas of their own, such as strings; only those with a name become components.
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in table.operations:
        path = re.sub(r"\{(\w+)(?::\w+)?\}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, known, components, keyed=keyed)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Atlas", "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "tags": [{"name": name} for name in dict.fromkeys(each.tag for each in table.operations)],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": dict(_SECURITY)},
    }


def _types(operation: Operation) -> Iterator[Any]:
    yield from (each for each in (operation.body, operation.query, operation.events) if each is not None)
    yield operation.errors.schema
    yield from operation.also.values()
    if operation.media == JSON:
        yield operation.answer
    if operation.anthropic is not None:
        yield from (operation.anthropic, ANTHROPIC.schema)


def _operation(
    operation: Operation, known: Mapping[int, Any], components: Mapping[str, Any], *, keyed: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": _identifier(operation),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(operation, known),
    }
    parameters = [*_path_parameters(operation), *_query_parameters(operation, known, components)]
    if operation.anthropic is not None:
        about = "Asks for the answer in Anthropic's shape, whatever it is."
        parameters.append(
            {
                "name": "anthropic-version",
                "in": "header",
                "required": False,
                "schema": {"type": "string"},
                "description": about,
            }
        )
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        content: dict[str, Any] = {"schema": _any_of(operation, "body", known)}
        if operation.example is not None:
            content["example"] = operation.example
        found["requestBody"] = {"required": not operation.body_optional, "content": {JSON: content}}
    if not operation.open:
        keys: list[dict[str, list[str]]] = [{name: []} for name in _SECURITY]
        found["security"] = keys if keyed else [{}, *keys]
    else:
        found["security"] = []
    return found


def _identifier(operation: Operation) -> str:
    """A name for generated clients: the method and the words of the path."""
    words = re.findall(r"\w+", re.sub(r":\w+\}", "}", operation.path))
    return "_".join([operation.method.lower(), *words])


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)", operation.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(
    operation: Operation, known: Mapping[int, Any], components: Mapping[str, Any]
) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    schema = components[known[id(operation.query)]["$ref"].rpartition("/")[2]]
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": of}
        for name, of in schema["properties"].items()
    ]


def _responses(operation: Operation, known: Mapping[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {TEXT: {"schema": {"type": "string"}}}
    if operation.media == JSON:
        answer = _any_of(operation, "answer", known)
        content = {JSON: {"schema": _either(answer, operation.anthropic, known)}}
    if operation.events is not None:
        content[EVENTS] = {"schema": _event(_any_of(operation, "events", known), operation.last)}
    id_headers = dict.fromkeys(operation.errors.headers, _REQUEST_ID)
    found: dict[str, Any] = {
        str(int(operation.status)): {"description": "The answer.", "headers": id_headers, "content": content}
    }
    for status, kind in operation.also.items():
        content = {JSON: {"schema": known[id(kind)]}}
        found[str(status)] = {"description": _phrase(status), "headers": id_headers, "content": content}
    for status in operation.all_statuses:
        headers = id_headers | ({"retry-after": _RETRY_AFTER} if status == HTTPStatus.TOO_MANY_REQUESTS else {})
        error = _either(known[id(operation.errors.schema)], operation.anthropic and ANTHROPIC.schema, known)
        found[str(status)] = {
            "description": _phrase(status), "headers": headers, "content": {JSON: {"schema": error}},
        }  # fmt: skip
    return found


def _any_of(operation: Operation, member: str, known: Mapping[int, Any]) -> Any:
    """The schema of a ``member`` of an operation, or of all those that it may be."""
    kinds = [getattr(each, member) for each in operation.either or (operation,)]
    found = [known[id(kind)] for kind in kinds if kind is not None]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _either(schema: Any, other: Any, known: Mapping[int, Any]) -> Any:
    return schema if other is None else {"anyOf": [schema, known[id(other)]]}


def _event(data: Any, last: str | None) -> dict[str, Any]:
    """The schema of one event of a stream: OpenAPI 3.1 has no word for it, and tools take the schema of a stream for that of each event."""
    payload: dict[str, Any] = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    if last is not None:
        payload = {"anyOf": [payload, {"const": last}]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": payload}, "required": ["data"]}


def _phrase(status: int) -> str:
    return _PHRASES.get(status, "Overloaded")
