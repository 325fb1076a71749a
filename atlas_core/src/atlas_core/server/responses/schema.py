"""The fields of ``POST /v1/responses`` and of what counts its tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from atlas_core.server.schema import (
    NEUTRAL_EVERYWHERE,
    Effort,
    Fraction,
    NotNegative,
    Penalty,
    Positive,
    Salt,
    StopText,
)
from atlas_core.vocab.sampling import MAX_TOP_LOGPROBS

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]


class ReasoningOptions(Struct, kw_only=True):
    """``effort`` is handed to the chat template; none asks for no thought. With ``summary`` the thought is given as a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Struct, kw_only=True):
    """``format`` is text, json_object or json_schema, flat; ``verbosity`` is handed to the chat template."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class InputRequest(Struct, kw_only=True):
    """What decides on the prompt. Null is the same as absent, everywhere."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: NotNegative | None = None


class ResponsesRequest(InputRequest, kw_only=True):
    """``POST /v1/responses``. ``store`` is true unless said otherwise.

    From ``top_k`` on: sampling fields that OpenAI's endpoint does not have, as the chat endpoint takes them.
    """

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Fraction | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=100.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    ignore_eos: bool | None = None
    min_tokens: NotNegative | None = None
    cache_salt: Salt | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **NEUTRAL_EVERYWHERE,
        "prompt": (), "context_management": ([],), "moderation": (), "n": (1,), "background_options": (),
        "max_tokens": (), "max_completion_tokens": (), "messages": (), "response_format": (), "logprobs": (False,),
        "reasoning_effort": (), "enable_thinking": (), "thinking": (), "thinking_budget": (), "max_thinking_tokens": (),
        "logit_bias": ({},), "structured_outputs": ({},), "regex": (), "json_schema": (), "stop_token_ids": ([],), "best_of": (1,), "echo": (False,),
    }
)  # fmt: skip
"""Fields that would change the answer and are not served; see server.schema. The last ones are the chat endpoint's."""

WITHOUT_EFFECT = frozenset(
    {
        "service_tier", "prompt_cache_retention", "prompt_cache_options", "client_metadata", "access_programs", "image",
        "personality", "request_id",
    }
)  # fmt: skip
"""Fields that are known and change no answer."""
