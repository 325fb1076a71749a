"""The shapes of this face's answers, for the API document."""

from typing import Any, Literal

from msgspec import Struct

from atlas_core.server.errors import AnthropicDetail

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(Struct, tag_field="type", tag="text"):
    """A piece of the answer's own text."""

    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    """A thought; ``signature`` may come back with it, or any other."""

    thinking: str
    signature: str


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class OutputDetails(Struct):
    """``thinking_tokens``: those of thoughts."""

    thinking_tokens: int


class MessageUsage(Struct):
    """What a request took, in tokens. ``input_tokens`` leaves out those that were read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails


class Message(Struct):
    """An answer; ``stop_reason`` is null while it is being written."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The message without content, with what is known of its prompt."""

    message: Message


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins; blocks follow one another."""

    index: int
    content_block: Content


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    """What a thought ends with."""

    signature: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON of a call's input."""

    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """What the open block gained."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """The open block is whole."""

    index: int


class Ending(Struct):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """How it ended, and what it took in all."""

    delta: Ending
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """Nothing follows."""


class Ping(Struct, tag_field="type", tag="ping"):
    """The connection lives."""


class Failure(Struct, tag_field="type", tag="error"):
    """The stream broke off."""

    error: AnthropicDetail
    request_id: str | None


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | Failure


class Counted(Struct):
    """The tokens of a prompt."""

    input_tokens: int
