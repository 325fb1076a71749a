"""``POST /v1/embeddings``, for models that give such."""

import array
import asyncio
import base64
import math
import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server import shapes
from atlas_core.server.boundary import json_response, record_of
from atlas_core.server.endpoint import Shared, read_asked, served_name
from atlas_core.server.generation import while_connected
from atlas_core.server.ports import Embedder, Service
from atlas_core.server.routes import Operation
from atlas_core.server.schema import EmbeddingsRequest
from atlas_core.server.translate import check_prompt, split_prompts
from atlas_core.vocab.errors import RequestError


class Embeddings:
    """Prompts to vectors."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def operations(self) -> list[Operation]:
        """The route."""
        return [
            Operation(
                path="/v1/embeddings", method="POST", endpoint=self.embed, summary="Texts to vectors", tag="Embeddings",
                body=EmbeddingsRequest, example={"input": ["The sky is blue."]}, answer=shapes.EmbeddingList,
                statuses=frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS}),
            ),
        ]  # fmt: skip

    async def embed(self, request: Request) -> Response:
        """A vector for each input. Raises RequestError, also for a model that gives none."""
        shared, record = self._shared, record_of(request.scope)
        service = shared.lifecycle.service()
        asked = await read_asked(request, EmbeddingsRequest, shared)
        record.requested = asked.model or ""
        record.model = served_name(service.model, asked.model, strict=shared.options.strict_model)
        embedder = _embedder(service, asked)
        prompts = await asyncio.to_thread(_prompts, service, embedder, asked)
        record.prompt_tokens = sum(map(len, prompts))
        capacity = service.engine.info.max_batch_size + shared.options.max_queue
        with shared.gate.enter(min(len(prompts), service.engine.info.max_batch_size), capacity):
            vectors = await while_connected(
                request.receive, _all(embedder, prompts, service.engine.info.max_batch_size)
            )
        for prompt in prompts:
            shared.metrics.finished("stop", len(prompt), 0)
        write = list if asked.encoding_format == "float" else _base64
        size = asked.dimensions or embedder.size
        return json_response(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": write(_cut(vector, size, embedder))}
                    for index, vector in enumerate(vectors)
                ],
                "model": record.model,
                "usage": {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens},
            }
        )


def _embedder(service: Service, asked: EmbeddingsRequest) -> Embedder:
    if service.embedder is None:
        raise RequestError(
            f"the model {service.model.names[0]} gives no embeddings", "it was trained to go on with texts",
            "serve an embedding model", kind="unsupported", field="model", code="no_embeddings",
        )  # fmt: skip
    size = service.embedder.size
    if asked.dimensions is not None and not 1 <= asked.dimensions <= size:
        raise RequestError(
            f"dimensions cannot be {asked.dimensions}", f"the model's vectors have {size}", f"ask for 1 to {size}",
            field="dimensions", code="invalid_value",
        )  # fmt: skip
    return service.embedder


def _prompts(service: Service, embedder: Embedder, asked: EmbeddingsRequest) -> list[tuple[int, ...]]:
    split = split_prompts(asked.input, "input")
    tokenizer, info = service.model.tokenizer, service.engine.info
    found = []
    for index, prompt in enumerate(split):
        field = "input" if len(split) == 1 else f"input[{index}]"
        if not prompt:
            raise RequestError(
                f"{field} is empty", "nothing has no vector", "leave it out", field=field, code="empty_prompt"
            )
        # What users write can never become a control token, here as elsewhere.
        ids = tokenizer.encode(embedder.prompt + prompt, parse_special=False) if isinstance(prompt, str) else prompt
        found.append(check_prompt(ids, info, field, answered=False))
    return found


def _cut(vector: Sequence[float], size: int, embedder: Embedder) -> Sequence[float]:
    """The first ``size`` numbers (Kusupati et al., 2022: they are a vector of their own), normalised after that, as the model's are."""
    part = vector[:size]
    length = math.hypot(*part) if embedder.normalised else 1.0
    return part if length in (0.0, 1.0) else [value / length for value in part]


async def _all(embedder: Embedder, prompts: Sequence[tuple[int, ...]], at_once: int) -> list[Sequence[float]]:
    """The vectors of ``prompts``, asked for ``at_once`` at a time; the first failure ends them all."""
    room = asyncio.Semaphore(at_once)

    async def one(ids: tuple[int, ...]) -> Sequence[float]:
        async with room:
            return await embedder.embed(ids)

    tasks = [asyncio.ensure_future(one(ids)) for ids in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _base64(vector: Sequence[float]) -> Any:
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")
