"""From what a script asks for to sequences, by the rules of the HTTP endpoints: one schema, one set of defaults. Pure."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from atlas_core.server.chat import Chat
from atlas_core.server.completions import Completions
from atlas_core.server.ports import ServedModel
from atlas_core.server.schema import ChatRequest, CompletionRequest, Request, read_request
from atlas_core.server.translate import sampling_params, sequences
from atlas_core.server.turn import Prompt
from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.messages import Ready
from atlas_core.vocab.sampling import SamplingParams

R = TypeVar("R", bound=Request)

_FOREIGN = frozenset(
    {
        "model", "prompt", "messages", "stream", "stream_options", "return_token_ids", "echo", "suffix", "tools", "tool_choice",
        "parallel_tool_calls", "response_format", "structured_outputs", "thinking_token_budget", "thinking_budget",
        "max_thinking_tokens", "thinking", "enable_thinking", "reasoning", "regex",
        "json_schema",
    }
)  # fmt: skip
"""Fields of the endpoints that a call has an argument for, or no use."""


class Asked(Struct, frozen=True):
    """One sequence to generate, for the prompt number ``index``."""

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams


def asked_prompts(
    prompts: Any, params: Any, sampling: Mapping[str, Any], served: ServedModel, info: Ready
) -> list[Asked]:
    """The sequences of ``LLM.generate``. Raises RequestError naming the field."""
    whole = _plain(prompts)
    several = isinstance(whole, list) and not all(isinstance(part, int) for part in whole)
    each: list[Any] = whole if several else [whole]
    asked = []
    for index, (prompt, fields) in enumerate(zip(each, _fields(params, sampling, len(each)), strict=True)):
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            raise RequestError(
                f"prompts[{index}] is no prompt", "it is a list within a list, and not one of token ids",
                "give texts, or lists of token ids", field="prompts",
            )  # fmt: skip
        request = _read(CompletionRequest, {**fields, "prompt": prompt})
        found = Completions().prompts(request, served, info)
        asked += _asked(index, found, request, served, info)
    return asked


def asked_chat(
    messages: Any, params: Any, sampling: Mapping[str, Any], served: ServedModel, info: Ready
) -> list[Asked]:
    """The sequences of ``LLM.chat``. Raises RequestError naming the field."""
    whole = _plain(messages)
    several = isinstance(whole, list) and bool(whole) and all(isinstance(part, list) for part in whole)
    each: list[Any] = whole if several else [whole]
    asked = []
    for index, (conversation, fields) in enumerate(zip(each, _fields(params, sampling, len(each)), strict=True)):
        request = _read(ChatRequest, {**fields, "messages": conversation})
        found = Chat().prompts(request, served, info)
        asked += _asked(index, found, request, served, info)
    return asked


def _asked(index: int, prompts: list[Prompt], request: Request, served: ServedModel, info: Ready) -> list[Asked]:
    sampling = sampling_params(request, served.sampling, info)
    made = sequences(prompts, request.n or 1, sampling, "", 0.0)
    return [Asked(index, one.prompt, one.sampling) for one in made]


def _read(kind: type[R], body: Mapping[str, Any]) -> R:
    """``body`` as a request. Unlike the endpoints, whose clients may be newer than they, a name that is unknown is refused."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)} - _FOREIGN
    given = body.keys() - {"prompt", "messages"}
    for name in sorted(given - known):
        read_request(kind, body)  # says it better when the field is one that is known and not supported
        near = get_close_matches(name, known, n=1)
        raise RequestError(
            f"{name} is no sampling parameter", f"did you mean {near[0]}?" if near else "",
            f"there are {', '.join(sorted(known))}", field=name, code="unknown_parameter",
        )  # fmt: skip
    return read_request(kind, body)


def _fields(params: Any, sampling: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The fields for each of ``count`` prompts: ``sampling`` over the common or its own ``params``."""
    if params is None or isinstance(params, Mapping):
        return [{**_converted(params or {}), **_converted(sampling)}] * count
    given = list(params)
    if len(given) != count:
        raise RequestError(
            f"there are {len(given)} sets of parameters for {count} prompts", "each needs its own",
            "give one for all, or one for each", field="params",
        )  # fmt: skip
    return [{**_converted(one), **_converted(sampling)} for one in given]


def _converted(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """``value`` with tuples and other sequences as lists, and whole-number keys as text: what JSON would have made of it."""
    if isinstance(value, Mapping):
        return {str(key) if isinstance(key, int) else key: _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(part) for part in value]
    return value
