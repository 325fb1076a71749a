"""The shapes of responses, items and conversations, for the API document; see server.shapes."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from atlas_core.server.shapes import TokenProbability

Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, tag_field="type", tag="input_text"):
    """Text that was sent."""

    text: str


class PlainText(Struct, tag_field="type", tag="text"):
    """Text that was sent, in the spelling of the chat endpoint."""

    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text that the model wrote."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenProbability]


class Refusal(Struct, tag_field="type", tag="refusal"):
    """A refusal in a history that was sent."""

    refusal: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """A thought, given as its summary."""

    text: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """A thought."""

    text: str


Part = InputText | PlainText | OutputText | Refusal | SummaryText | ReasoningText


class MessageItem(Struct, tag_field="type", tag="message"):
    """A message."""

    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus
    content: list[Part]


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """A thought."""

    id: str
    summary: list[Part]
    content: list[Part] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus | UnsetType = UNSET


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """A call of a function; ``arguments`` is JSON, as text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class FunctionCallOutputItem(Struct, tag_field="type", tag="function_call_output"):
    """What a function gave back."""

    id: str
    call_id: str
    output: str | list[Part]
    status: ItemStatus


class CustomToolCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a tool that takes text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class CustomToolCallOutputItem(Struct, tag_field="type", tag="custom_tool_call_output"):
    """What such a tool gave back."""

    id: str
    call_id: str
    output: str | list[Part]
    status: ItemStatus


AnyItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
)


class InputDetails(Struct):
    """``cached_tokens``: those that were not computed again. What is written into the cache is not counted."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct):
    """``reasoning_tokens``: those of thoughts."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """What a response took, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(Struct):
    """Why a response came to nothing."""

    code: str
    message: str


class Incomplete(Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ConversationReference(Struct):
    """The conversation that a response belongs to."""

    id: str


class ResponseObject(Struct):
    """A response. The members from ``background`` to ``truncation`` repeat the request, with what held where it said nothing."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    model: str
    output: list[AnyItem]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    background: bool
    conversation: ConversationReference | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float
    truncation: Literal["auto", "disabled"]


class ResponseEvent(Struct):
    """One event of a stream; ``event:`` repeats its type. The first has ``response``, the last has it whole."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: AnyItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET


class Page(Struct):
    """A page of items; ``first_id`` and ``last_id`` are null where it is empty."""

    object: Literal["list"]
    data: list[AnyItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct):
    """How many tokens the prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(Struct):
    """What was deleted."""

    id: str
    object: Literal["response.deleted", "conversation.deleted"]
    deleted: Literal[True]


class ConversationObject(Struct):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class PageQuery(Struct):
    """``order`` is desc unless given; ``after`` is the id of the item to go on behind."""

    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class RetrieveQuery(Struct):
    """``stream`` asks for the events of a response in the background, from the one behind ``starting_after`` on."""

    stream: bool = False
    starting_after: int | None = None
