"""``POST /tokenize``, ``/detokenize``, ``/apply-template``: the same ids that requests are made of."""

import asyncio
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server import shapes
from atlas_core.server.boundary import json_response
from atlas_core.server.conversation import declared_tools
from atlas_core.server.endpoint import Shared, read_asked, served_name
from atlas_core.server.ports import ServedModel, Service
from atlas_core.server.prompt import Conversation, Pieces, encode_pieces, render
from atlas_core.server.routes import Operation
from atlas_core.server.schema import DetokenizeRequest, TemplateRequest, TokenizeRequest
from atlas_core.server.translate import check_ids
from atlas_core.vocab.errors import RequestError

T = TypeVar("T", TokenizeRequest, DetokenizeRequest, TemplateRequest)
_NO_MODEL = frozenset({HTTPStatus.NOT_FOUND})


class Tokens:
    """Text to ids and back, as other servers' clients spell it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def operations(self) -> list[Operation]:
        """The routes."""
        return [
            Operation(
                path="/tokenize", method="POST", endpoint=self.tokenize, summary="Text to ids", tag="Tokens",
                body=TokenizeRequest, example={"prompt": "The sky is"}, answer=shapes.Tokenized, statuses=_NO_MODEL,
            ),
            Operation(
                path="/detokenize", method="POST", endpoint=self.detokenize, summary="Ids to text", tag="Tokens",
                body=DetokenizeRequest, example={"tokens": [1, 2]}, answer=shapes.Detokenized, statuses=_NO_MODEL,
            ),
            Operation(
                path="/apply-template", method="POST", endpoint=self.apply_template, summary="A conversation as the model reads it",
                tag="Tokens", body=TemplateRequest, example={"messages": [{"role": "user", "content": "hi"}]},
                answer=shapes.Rendered, statuses=_NO_MODEL,
            ),
        ]  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        """``{tokens, count, max_model_len}`` of ``prompt`` (or ``content``), or of ``messages`` as the chat endpoint reads them."""
        service, asked = await self._read(request, TokenizeRequest)
        ids = await asyncio.to_thread(_tokenize, asked, service.model)
        answer: dict[str, Any] = {
            "tokens": ids, "count": len(ids), "max_model_len": service.engine.info.max_seq_len,
        }  # fmt: skip
        tokenizer = service.model.tokenizer
        if asked.return_token_strs:
            answer["token_strs"] = [tokenizer.decode([token], skip_special=False) for token in ids]
        if asked.with_pieces:
            answer["tokens"] = [{"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of ``tokens``, control tokens included, under every name in use: ``prompt``, ``text``, ``content``."""
        service, asked = await self._read(request, DetokenizeRequest)
        ids = check_ids(asked.tokens, service.engine.info.vocab_size, "tokens")
        text = service.model.tokenizer.decode(ids, skip_special=False)
        return json_response({"prompt": text, "text": text, "content": text})

    async def apply_template(self, request: Request) -> Response:
        """The prompt that the chat endpoint would make of ``messages``."""
        service, asked = await self._read(request, TemplateRequest)
        pieces = await asyncio.to_thread(_rendered, asked, service.model)
        return json_response({"prompt": "".join(text for text, _ in pieces)})

    async def _read(self, request: Request, kind: type[T]) -> tuple[Service, T]:
        service = self._shared.lifecycle.service()
        asked = await read_asked(request, kind, self._shared)
        served_name(service.model, asked.model, strict=self._shared.options.strict_model)
        return service, asked


def _tokenize(asked: TokenizeRequest, model: ServedModel) -> list[int]:
    given = [value for value in (asked.prompt, asked.content, asked.messages) if value is not None]
    if len(given) != 1:
        raise RequestError(
            "there is not one thing to tokenize", f"{len(given)} of prompt, content and messages are given", "send one of them",
            field="prompt", code="invalid_value",
        )  # fmt: skip
    special = asked.add_special_tokens if asked.add_special_tokens is not None else asked.add_special
    parse = asked.parse_special is not False
    if asked.prompt is not None:
        return model.tokenizer.encode(asked.prompt, add_special=special is not False, parse_special=parse)
    if asked.content is not None:
        return model.tokenizer.encode(asked.content, add_special=bool(special), parse_special=parse)
    return encode_pieces(model.tokenizer, _rendered(asked, model), add_special=bool(special), parse_special=parse)


def _rendered(asked: TokenizeRequest | TemplateRequest, model: ServedModel) -> Pieces:
    conversation = Conversation(
        asked.messages or (), declared_tools(asked.tools or ()), asked.add_generation_prompt,
        bool(asked.continue_final_message), asked.chat_template_kwargs, thinking=model.thinking,
    )  # fmt: skip
    pieces, _ = render(model, conversation)
    return pieces


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
