"""``POST /v1/chat/completions``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from atlas_core.server.logprobs import chat_logprobs
from atlas_core.server.ports import ServedModel, Tokenizer
from atlas_core.server.schema import ChatRequest
from atlas_core.server.sse import ChunkTemplate, encode
from atlas_core.server.translate import check_messages, check_prompt
from atlas_core.server.turn import Output, Prompt, Turn, usage
from atlas_core.text.guard import Guard
from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.messages import Delta, Ready

_ROLE = b'{"role":"assistant","content":""}'


class Chat:
    """The chat face."""

    kind = ChatRequest
    id_prefix = "chatcmpl-"

    def count(self, request: ChatRequest) -> int:
        """One: the conversation."""
        return 1

    def prompts(self, request: ChatRequest, model: ServedModel, info: Ready) -> list[Prompt]:
        """One prompt: the messages, as the model's template writes them."""
        going_on = bool(request.continue_final_message)
        extra = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", request.reasoning_effort)
        opening = request.add_generation_prompt
        pieces = render(model, request.messages, opening=opening, going_on=going_on, extra=extra)
        # The template has printed what belongs round the text.
        ids = encode_pieces(model.tokenizer, pieces, add_special=False)
        return [Prompt(check_prompt(ids, info, "messages"))]

    def whole(self, turn: Turn, outputs: Sequence[Output]) -> dict[str, Any]:
        """A ``chat.completion``."""
        body = {
            **_envelope(turn, "chat.completion"),
            "choices": [_choice(turn, index, output) for index, output in enumerate(outputs)],
            "usage": usage(outputs, turn.n),
        }
        return body | ({"prompt_token_ids": turn.prompts[0].ids} if turn.token_ids else {})

    def writer(self, turn: Turn) -> "ChatChunks":
        """A writer of ``chat.completion.chunk`` events."""
        return ChatChunks(turn)


class ChatChunks:
    """First a delta with the role, then deltas with text, last an empty one with the finish reason."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._template = ChunkTemplate(_envelope(turn, "chat.completion.chunk"), usage_null=turn.include_usage)
        self._opened = [False] * len(turn.sequences)
        self._heads = [f'{{"index":{index},"delta":'.encode() for index in range(len(turn.sequences))]

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Events for ``delta``: none while its text is held back and nothing else was asked for."""
        events = b""
        if not self._opened[index]:
            events = self._event(index, _ROLE, more=b"" if any(self._opened) else self._prompt_ids())
            self._opened[index] = True
        if delta.text or (delta.logprobs and self._turn.wants_logprobs) or (delta.tokens and self._turn.token_ids):
            events += self._event(index, b'{"content":' + encode(delta.text) + b"}", delta)
        if delta.finish is not None:
            events += self._event(index, b"{}", finish=encode(delta.finish))
        return events

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """The usage, if it was asked for."""
        return self._template.closing(usage(outputs, self._turn.n)) if self._turn.include_usage else b""

    def _event(
        self, index: int, content: bytes, delta: Delta | None = None, *, finish: bytes = b"null", more: bytes = b""
    ) -> bytes:
        choice = self._heads[index] + content
        if delta is not None and self._turn.wants_logprobs:
            choice += b',"logprobs":' + encode(_logprobs(chat_logprobs(delta.logprobs, self._turn.hidden)))
        else:
            choice += b',"logprobs":null'
        choice += b',"finish_reason":' + finish
        if delta is not None and self._turn.token_ids:
            choice += b',"token_ids":' + encode(delta.tokens)
        return self._template.choice(choice + b"}", more)

    def _prompt_ids(self) -> bytes:
        return b',"prompt_token_ids":' + encode(self._turn.prompts[0].ids) if self._turn.token_ids else b""


def render(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    opening: bool | None,
    going_on: bool,
    extra: Mapping[str, Any],
) -> Iterator[tuple[str, bool]]:
    """The text of a conversation, in pieces with whether control tokens in them are meant (see text.guard).

    ``opening`` unsaid means: open the answer, unless the last turn is gone on with.

    Raises RequestError for messages of a wrong shape, for a model without a template, and when the template refuses.
    """
    check_messages(messages)
    if model.template is None:
        raise RequestError(
            "this model has no chat template", "its checkpoint brings none, as base models do",
            "use the completions endpoint, or start the server with --chat-template FILE",
            kind="unsupported", code="no_chat_template",
        )  # fmt: skip
    guard = Guard(model.tokenizer.special_tokens, [messages, extra])
    text = model.template.render(
        guard.conceal(messages),
        add_generation_prompt=not going_on if opening is None else opening,
        continue_final_message=going_on,
        extra=guard.conceal(extra),
    )
    return guard.pieces(text)


def encode_pieces(
    tokenizer: Tokenizer, pieces: Iterable[tuple[str, bool]], *, add_special: bool, parse_special: bool = True
) -> list[int]:
    """Ids of a rendered conversation: control tokens are read where they are meant, if ``parse_special`` says so at all."""
    ids: list[int] = []
    for text, meant in pieces:
        ids += tokenizer.encode(text, add_special=add_special and not ids, parse_special=meant and parse_special)
    return ids


def _envelope(turn: Turn, kind: str) -> dict[str, Any]:
    return {
        "id": turn.id, "object": kind, "created": turn.created, "model": turn.model, "system_fingerprint": turn.fingerprint,
    }  # fmt: skip


def _choice(turn: Turn, index: int, output: Output) -> dict[str, Any]:
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": _logprobs(chat_logprobs(output.positions, turn.hidden)) if turn.wants_logprobs else None,
        "finish_reason": output.finish,
    }
    return choice | ({"token_ids": output.tokens} if turn.token_ids else {})


def _logprobs(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": content, "refusal": None}
