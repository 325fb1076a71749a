"""``POST /v1/messages``: the face, and the writer of its streams."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from atlas_core.server.answer import AnswerReader, Reading
from atlas_core.server.chat import Chat
from atlas_core.server.errors import anthropic_error
from atlas_core.server.messages.content import Blocks, joined
from atlas_core.server.messages.schema import (
    UNSUPPORTED,
    WITHOUT_EFFECT,
    CountRequest,
    MessagesRequest,
    TranslatedRequest,
)
from atlas_core.server.messages.translate import in_its_own_words, translate
from atlas_core.server.ports import ServedModel
from atlas_core.server.schema import read_request, unknown_fields
from atlas_core.server.sse import encode
from atlas_core.server.turn import Output, Prompt, Turn
from atlas_core.vocab.errors import AtlasError, RequestError
from atlas_core.vocab.messages import Delta, Ready


class Messages:
    """The face of Anthropic's messages; prompts are those of the chat face."""

    id_prefix = "msg_"

    def __init__(self) -> None:
        self._chat = Chat()

    def read(self, body: Mapping[str, Any]) -> tuple[TranslatedRequest, list[str]]:
        """See Face."""
        return read(MessagesRequest, body)

    def count(self, request: TranslatedRequest) -> int:
        """One: the conversation."""
        return 1

    def reading(self, request: TranslatedRequest, model: ServedModel) -> Reading:
        """As in chat, with ids of calls as Anthropic's look."""
        try:
            return replace(self._chat.reading(request, model), call_prefix="toolu_")
        except RequestError as error:
            raise in_its_own_words(error, request.places) from None

    def quick(self, request: TranslatedRequest) -> bool:
        """No: templates are programs."""
        return False

    def prompts(self, request: TranslatedRequest, model: ServedModel, info: Ready) -> list[Prompt]:
        """One prompt. Raises RequestError for one that is too long, in the words by which clients know that."""
        prompt = self.prompt(request, model, info)
        if len(prompt.ids) >= info.max_seq_len:
            raise RequestError(
                f"prompt is too long: {len(prompt.ids)} tokens > {info.max_seq_len - 1} maximum",
                "prompt and answer share the context, and an answer needs one token at least",
                "shorten the prompt, or start the server with a larger --max-seq-len",
                field="messages", code="context_length_exceeded",
            )  # fmt: skip
        return [prompt]

    def prompt(self, request: TranslatedRequest, model: ServedModel, info: Ready) -> Prompt:
        """The prompt, of any length."""
        try:
            (prompt,) = self._chat.prompts(request, model, replace(info, max_seq_len=sys.maxsize))
        except RequestError as error:
            raise in_its_own_words(error, request.places) from None
        return prompt

    def whole(self, turn: Turn, outputs: Sequence[Output]) -> dict[str, Any]:
        """A ``message``."""
        (output,) = outputs
        reader, blocks = AnswerReader(turn.reading, turn.prompt_of(0).opening), Blocks()
        read = [*reader.push(output.text), *reader.finish(cut=output.finish == "length")]
        content = joined([*blocks.push(read), *blocks.close()])
        ending = _ending(turn, output, client_stop(turn, output.stop, output.tokens), calls=reader.calls)
        return {**_envelope(turn), "content": content, **ending, "usage": _usage(output)}

    def writer(self, turn: Turn) -> "MessageEvents":
        """A writer of the events of a message."""
        return MessageEvents(turn)


def read(kind: type[CountRequest], body: Mapping[str, Any]) -> tuple[TranslatedRequest, list[str]]:
    """``body`` as ``kind``, translated; and the names of what in it is unknown. Raises RequestError that names the field."""
    if body.get("thread") is not None:
        # In these words the SDKs understand it, and send the whole conversation.
        raise RequestError(
            "thread is not supported", "this server keeps no conversations of this endpoint", "send all messages each time",
            kind="unsupported", field="thread", code="thread_unsupported_request",
        )  # fmt: skip
    request = read_request(kind, body, UNSUPPORTED)
    translated, skipped = translate(request)
    # Whoever counts sends the same body as for an answer.
    return translated, [*unknown_fields(MessagesRequest, body, UNSUPPORTED.keys() | WITHOUT_EFFECT), *skipped]


class MessageEvents:
    """``message_start`` comes with the first delta, which knows how much of the prompt was cached; pings may come before it."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._reader = AnswerReader(turn.reading, turn.prompt_of(0).opening)
        self._blocks = Blocks()
        self._opened = False
        self._stop: str | None = None

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Events for ``delta``: none while its text is held back."""
        events: list[dict[str, Any]] = []
        if not self._opened:
            self._opened = True
            usage = Output()
            usage.count(delta)
            message = {
                **_envelope(self._turn),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(usage),
            }
            events.append({"type": "message_start", "message": message})
        events += self._blocks.push(self._reader.push(delta.text))
        if delta.finish is not None:
            events += self._blocks.push(self._reader.finish(cut=delta.finish == "length"))
            events += self._blocks.close()
            self._stop = client_stop(self._turn, delta.stop, delta.tokens)
        return b"".join(map(_event, events))

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """Why it ended and what it took."""
        (output,) = outputs
        ending = _ending(self._turn, output, self._stop, calls=self._reader.calls)
        return _event({"type": "message_delta", "delta": ending, "usage": _usage(output)}) + _event(
            {"type": "message_stop"}
        )

    def failed(self, error: AtlasError) -> bytes:
        """An event of that name: SDKs raise it."""
        return _event(anthropic_error(error))


def client_stop(turn: Turn, stop: str | None, tokens: Sequence[int]) -> str | None:
    """The client's stop sequence that ended the answer: ``stop`` may also be a token id, in decimal, or the dialect's own."""
    by_token = bool(tokens) and stop == str(tokens[-1])
    return stop if stop in turn.stops and not by_token else None


def _ending(turn: Turn, output: Output, stop: str | None, *, calls: int) -> dict[str, Any]:
    if output.finish == "length":
        allowed = turn.sequences[0].sampling.max_tokens
        cut = allowed is not None and output.completion_tokens >= allowed
        reason = "max_tokens" if cut else "model_context_window_exceeded"
    elif stop is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}


def _envelope(turn: Turn) -> dict[str, Any]:
    return {"id": turn.id, "type": "message", "role": "assistant", "model": turn.model}


def _usage(output: Output) -> dict[str, Any]:
    """The prompt's tokens stand apart by whether they were computed; nothing is told of what will be cached."""
    return {
        "input_tokens": output.prompt_tokens - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": output.completion_tokens,
        "output_tokens_details": {"thinking_tokens": output.reasoning_tokens},
    }


def _event(event: Mapping[str, Any]) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + encode(event) + b"\n\n"
