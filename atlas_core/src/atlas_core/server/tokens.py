"""``POST /tokenize`` and ``/detokenize``: the same ids that requests are made of."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from atlas_core.server import shapes
from atlas_core.server.body import parse_object, read_body
from atlas_core.server.boundary import json_response
from atlas_core.server.conversation import declared_tools
from atlas_core.server.endpoint import Shared
from atlas_core.server.ports import ServedModel
from atlas_core.server.prompt import Conversation, encode_pieces, render
from atlas_core.server.routes import Operation
from atlas_core.server.schema import DetokenizeRequest, R, TokenizeRequest, read_request, unknown_fields
from atlas_core.server.translate import check_ids
from atlas_core.vocab.errors import RequestError


class Tokens:
    """Text to ids and back, as other servers' clients spell it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def operations(self) -> list[Operation]:
        """The routes."""
        return [
            Operation(
                path="/tokenize", method="POST", endpoint=self.tokenize, summary="Text to ids", tag="Tokens",
                body=TokenizeRequest, answer=shapes.Tokenized,
            ),
            Operation(
                path="/detokenize", method="POST", endpoint=self.detokenize, summary="Ids to text", tag="Tokens",
                body=DetokenizeRequest, answer=shapes.Detokenized,
            ),
        ]  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        """``{tokens, count, max_model_len}`` of ``prompt`` (or ``content``), or of ``messages`` as the chat endpoint reads them."""
        service = self._shared.lifecycle.service()
        asked = await self._read(request, TokenizeRequest)
        ids = await asyncio.to_thread(_tokenize, asked, service.model)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.engine.info.max_seq_len})

    async def detokenize(self, request: Request) -> Response:
        """The text of ``tokens``, control tokens included, under every name in use: ``prompt``, ``text``, ``content``."""
        service = self._shared.lifecycle.service()
        asked = await self._read(request, DetokenizeRequest)
        ids = check_ids(asked.tokens, service.engine.info.vocab_size, "tokens")
        text = service.model.tokenizer.decode(ids, skip_special=False)
        return json_response({"prompt": text, "text": text, "content": text})

    async def _read(self, request: Request, kind: type[R]) -> R:
        body = parse_object(await read_body(request.headers, request.stream(), self._shared.options.max_body))
        found = read_request(kind, body)
        self._shared.unknown.tell(unknown_fields(kind, body))
        return found


def _tokenize(asked: TokenizeRequest, model: ServedModel) -> list[int]:
    given = [value for value in (asked.prompt, asked.content, asked.messages) if value is not None]
    if len(given) != 1:
        raise RequestError(
            "there is not one thing to tokenize", f"{len(given)} of prompt, content and messages are given", "send one of them",
            field="prompt", code="invalid_value",
        )  # fmt: skip
    special = asked.add_special_tokens if asked.add_special_tokens is not None else asked.add_special
    parse = asked.parse_special is not False
    if asked.messages is None:
        text = asked.prompt if asked.prompt is not None else asked.content or ""
        return model.tokenizer.encode(text, add_special=special is not False, parse_special=parse)
    conversation = Conversation(
        asked.messages, declared_tools(asked.tools or ()), asked.add_generation_prompt, bool(asked.continue_final_message),
        asked.chat_template_kwargs, thinking=model.thinking,
    )  # fmt: skip
    pieces, _ = render(model, conversation)
    return encode_pieces(model.tokenizer, pieces, add_special=bool(special), parse_special=parse)
