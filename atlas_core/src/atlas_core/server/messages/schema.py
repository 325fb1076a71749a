"""The fields of ``POST /v1/messages`` and of what counts its tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from atlas_core.server.schema import (
    MAX_STOPS,
    NEUTRAL_EVERYWHERE,
    ChatRequest,
    Fraction,
    NotNegative,
    Penalty,
    Positive,
    Salt,
    StopText,
)


class ThinkingOptions(Struct, kw_only=True):
    """``budget_tokens`` limits a thought, where ``type`` is enabled. ``display`` has no effect: thoughts are shown."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Positive | None = None
    display: str | None = None


class ToolChoice(Struct, kw_only=True):
    """Which tools may be called; ``name`` is that of the one that must be, where ``type`` is tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Struct, kw_only=True):
    """``effort`` is handed to the chat template; ``format`` is ``{"type": "json_schema", "schema": …}``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountRequest(Struct, kw_only=True):
    """``POST /v1/messages/count_tokens``: what decides on the prompt. Null is the same as absent, everywhere."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``. From ``min_p`` on: fields that Anthropic does not have, as the chat endpoint takes them."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=100.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: NotNegative | None = None
    ignore_eos: bool | None = None
    cache_salt: Salt | None = None


class TranslatedRequest(ChatRequest, kw_only=True):
    """A request in the internal form. ``places`` leads from paths of this form to those of the request as it came."""

    places: dict[str, str]


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **NEUTRAL_EVERYWHERE,
        "mcp_servers": ([],), "n": (1,), "stop": (), "response_format": (), "max_completion_tokens": (), "logprobs": (False,),
        "reasoning_effort": (), "reasoning": (), "enable_thinking": (), "thinking_budget": (), "max_thinking_tokens": (),
        "thinking_token_budget": (), "logit_bias": ({},), "structured_outputs": ({},), "regex": (), "json_schema": (), "stop_token_ids": ([],),
    }
)  # fmt: skip
"""Fields that would change the answer and are not served; see server.schema. Most are the chat endpoint's."""

WITHOUT_EFFECT = frozenset(
    {
        "metadata", "service_tier", "cache_control", "container", "context_management", "diagnostics", "inference_geo", "speed",
        "betas", "anthropic_beta", "user_profile_id", "workspace_id",
    }
)  # fmt: skip
"""Fields that are known and change no answer: the context is never edited, and whatever is cached is so without being asked."""
