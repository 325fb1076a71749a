"""``GET /v1/models``: every name that the model answers to, in the shape of whoever asks."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server import shapes
from atlas_core.server.boundary import json_response
from atlas_core.server.endpoint import unknown_model
from atlas_core.server.lifecycle import Lifecycle
from atlas_core.server.ports import Service
from atlas_core.server.routes import Operation
from atlas_core.vocab.errors import RequestError


class Models:
    """The list, and one entry of it. Anthropic's clients give themselves away by a header."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def operations(self) -> list[Operation]:
        """The routes."""
        return [
            Operation(
                path="/v1/models", endpoint=self.all, summary="Every name that the model answers to", tag="Models",
                query=shapes.ModelQuery, answer=shapes.ModelList, anthropic=shapes.ModelPage,
            ),
            Operation(
                path="/v1/models/{id:path}", endpoint=self.one, summary="One model", tag="Models", answer=shapes.Model,
                anthropic=shapes.ModelInfo,
            ),
            Operation(
                path="/api/tags", endpoint=self.tags, summary="The same, for clients of Ollama", tag="Models",
                answer=shapes.ModelTags,
            ),
        ]  # fmt: skip

    async def all(self, request: Request) -> Response:
        """Every name as a model. Raises EngineError when the model is not ready, RequestError for a page that cannot be."""
        service = self._lifecycle.service()
        if "anthropic-version" not in request.headers:
            body = {"object": "list", "data": [_entry(service, name) for name in service.model.names]}
            # Codex cannot read a list without this. An entry would be a model that it has instructions for: there is none.
            return json_response(body | ({"models": []} if "client_version" in request.query_params else {}))
        names, more = page(service.model.names, request.query_params)
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return json_response({"data": [_info(service, name) for name in names], "has_more": more, **ends})

    async def one(self, request: Request) -> Response:
        """One model. Raises RequestError of kind not_found for a name that it has not."""
        service = self._lifecycle.service()
        name = request.path_params["id"]
        if name not in service.model.names:
            raise unknown_model(name, service.model)
        return json_response((_info if "anthropic-version" in request.headers else _entry)(service, name))

    async def tags(self, request: Request) -> Response:
        """Every name, in the shape in which clients look for Ollama's models. Raises EngineError when the model is not ready."""
        service = self._lifecycle.service()
        return json_response({"models": [_tag(service, name) for name in service.model.names]})


def page(names: tuple[str, ...], query: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """At most ``limit`` of ``names`` behind ``after_id``, or next to it before ``before_id``; and whether there are more there.

    Raises RequestError that names the field.
    """
    try:
        asked = msgspec.convert(dict(query), shapes.ModelQuery, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid("limit", str(error)) from None
    if asked.before_id is not None and asked.after_id is not None:
        raise _invalid("before_id", "after_id is given too")
    for field, name in (("before_id", asked.before_id), ("after_id", asked.after_id)):
        if name is not None and name not in names:
            raise _invalid(field, "there is no such model")
    if asked.before_id is not None:
        left = names[: names.index(asked.before_id)]
        return left[-asked.limit :], len(left) > asked.limit
    left = names if asked.after_id is None else names[names.index(asked.after_id) + 1 :]
    return left[: asked.limit], len(left) > asked.limit


def _entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "atlas",
        "root": service.model.names[0],
        "parent": None,
        "max_model_len": service.engine.info.max_seq_len,
        "meta": {"n_vocab": service.engine.info.vocab_size, "n_ctx": service.engine.info.max_seq_len},
    }


def _tag(service: Service, name: str) -> dict[str, Any]:
    return {"name": name, "model": name, "modified_at": _moment(service), "digest": service.engine.info.fingerprint}


def _moment(service: Service) -> str:
    return datetime.fromtimestamp(service.model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _info(service: Service, name: str) -> dict[str, Any]:
    context = service.engine.info.max_seq_len
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": _moment(service),
        "lifecycle": "active",
        "max_input_tokens": context - 1,
        "max_tokens": context,
    }


def _invalid(field: str, why: str) -> RequestError:
    return RequestError(f"{field} is not valid", why, "", field=field, code="invalid_value")
