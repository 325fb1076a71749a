"""The fields of requests, with their types and ranges; strict: ``"5"``, ``5.0`` and ``true`` are no integers."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.sampling import MAX_TOP_LOGPROBS

MAX_STOPS = 16
MAX_LEGACY_LOGPROBS = 5
MAX_N = 128
MAX_INPUTS = 2048
DEFAULT_COMPLETION_TOKENS = 16

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
StopText = Annotated[str, Meta(min_length=1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(Struct, kw_only=True):
    """Options of streams. ``include_obfuscation`` is taken and has no effect: no padding is ever added."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ThinkingField(Struct, kw_only=True):
    """Whether there is a thought, and the most tokens of it, as some clients spell it. ``adaptive`` leaves the length to the model."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: NotNegative | None = None


class ReasoningField(Struct, kw_only=True):
    """``reasoning_effort``, as the responses endpoint spells it, and what routers put beside it. Thoughts are never excluded."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: NotNegative | None = None
    exclude: bool | None = None


class Request(Struct, kw_only=True):
    """What both endpoints take. Null is the same as absent, everywhere.

    ``stop`` is one string or at most MAX_STOPS; ``seed`` is any 64-bit signed integer. ``top_k`` 0 and -1 are off.
    ``regex`` and ``json_schema`` are members of ``structured_outputs`` as SGLang and llama.cpp spell them.
    ``prompt_logprobs`` adds a list of that name, of every prompt token and so many alternatives; not in streams. ``return_token_ids`` adds
    ``token_ids`` to every choice and delta, and ``prompt_token_ids``. Only requests of one ``cache_salt`` use what was computed for one another.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Positive | None = None
    min_tokens: NotNegative | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=100.0)] | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[NotNegative] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    regex: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    cache_salt: Salt | None = None


class ChatRequest(Request, kw_only=True):
    """``POST /v1/chat/completions``. ``max_completion_tokens`` wins over ``max_tokens``; neither means up to the context size.

    ``thinking_token_budget`` is the most tokens of a thought; 0 asks for none. ``thinking_budget``, ``max_thinking_tokens``,
    ``thinking`` and ``enable_thinking`` are other spellings in use; see server.thinking. ``verbosity`` is a variable of the chat template.
    """

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningField | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingField | None = None
    thinking_budget: NotNegative | None = None
    max_thinking_tokens: NotNegative | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    thinking_token_budget: NotNegative | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(Request, kw_only=True):
    """``POST /v1/completions``. ``max_tokens`` is DEFAULT_COMPLETION_TOKENS unless given; Of ``best_of`` answers the best ``n`` are given.

    With ``echo`` or ``prompt_logprobs`` ``max_tokens`` may be 0. ``logprobs`` are then those of the prompt too.
    """

    max_tokens: NotNegative | None = None
    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """``POST /tokenize``: ``prompt`` or ``messages``. ``content`` and ``add_special`` are other spellings in use.

    Special tokens are added to a ``prompt`` unless ``add_special_tokens`` is false, to the others only if it is true. With
    ``return_token_strs`` the answer has the tokens' texts too; with ``with_pieces`` its tokens are objects with ``id`` and ``piece``.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class TemplateRequest(Struct, kw_only=True):
    """``POST /apply-template``: what the chat endpoint would make a prompt of."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class EmbeddingsRequest(Struct, kw_only=True):
    """``POST /v1/embeddings``: texts, or prompts of ids. ``dimensions`` may only be what the model gives."""

    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[NotNegative]


NEUTRAL_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "grammar": ("",), "ebnf": (),
    "use_beam_search": (False,), "length_penalty": (1.0,), "early_stopping": (False,), "bad_words": ([],),
    "allowed_token_ids": (), "logits_processors": ([],), "truncate_prompt_tokens": (),
    "priority": (0,), "top_n_sigma": (), "typical_p": (1.0,), "tfs_z": (1.0,),
    "mirostat": (0,), "dry_multiplier": (0.0,), "xtc_probability": (0.0,), "dynatemp_range": (0.0,), "adapter": (),
    "lora_path": (), "num_beams": (1,), "src_lang": (), "tgt_lang": (), "repetition_detection": (), "timeout": (),
    "report_expert_metadata": (False,), "no_repeat_ngram_size": (0,), "repeat_penalty": (1.0,), "stop_regex": ([],),
    "custom_logit_processor": (), "n_predict": (-1,),
}  # fmt: skip
"""Fields of other servers that would change any answer; see UNSUPPORTED."""

UNSUPPORTED: Mapping[type[Struct], Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        ChatRequest: {
            **NEUTRAL_EVERYWHERE,
            "functions": ([],), "function_call": ("none", "auto"),
            "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (),
            "echo": (False,), "best_of": (1,), "documents": ([],), "moderation": (),
        },
        CompletionRequest: {
            **NEUTRAL_EVERYWHERE, "suffix": ("",), "response_format": ({"type": "text"},), "thinking_token_budget": (),
        },
        TokenizeRequest: {},
        DetokenizeRequest: {},
        TemplateRequest: {},
        EmbeddingsRequest: {"truncate_prompt_tokens": ()},
    }
)  # fmt: skip
"""Fields that would change the answer and are not served: refused, unless null or one of these values, which change nothing."""

WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "request_id", "spaces_between_special_tokens",
    }
)  # fmt: skip
"""Fields that are known and change no answer."""

R = TypeVar("R", bound=Struct)

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`$")


def read_request(kind: type[R], body: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]] | None = None) -> R:
    """``body`` as ``kind``; ``unsupported`` is its row of UNSUPPORTED, where it has none there.

    Raises RequestError that names the field: of a wrong type, out of range, or not supported.
    """
    for name, neutral in (UNSUPPORTED[kind] if unsupported is None else unsupported).items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise RequestError(
                f"{name} is not supported", "this server would ignore it, and the answer would not be the one asked for",
                f"leave {name} out", kind="unsupported", field=name, code="unsupported_parameter",
            )  # fmt: skip
    try:
        return msgspec.convert(body, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None


def unknown_fields(kind: type[Struct], body: Mapping[str, Any], known: Iterable[str] = ()) -> list[str]:
    """Names in ``body`` that this server has never heard of; SDKs send new ones every month, so they are not refused.

    ``known`` are further names that it has.
    """
    further = frozenset(known)
    return [name for name in body if name not in _known(kind) and name not in further]


@cache
def _known(kind: type[Struct]) -> frozenset[str]:
    fields = (f.encode_name for f in msgspec.structs.fields(kind))
    return frozenset((*UNSUPPORTED.get(kind, ()), *WITHOUT_EFFECT, *fields))


def _explained(message: str) -> RequestError:
    found = _PLACE.match(message)
    what, path = (found["what"], found["path"] or "") if found else (message, "")
    missing = _MISSING.match(what)
    if missing:
        field = f"{path}.{missing['name']}".lstrip(".")
        return RequestError(
            f"{field} is missing", "the endpoint needs it", f"send {field}", field=field, code="missing_field"
        )
    field = path.replace("[...]", "")
    why = what.replace(" | null", "").replace("Expected", "expected")
    return RequestError(f"{field or 'the body'} is not valid", why, "", field=field or None, code="invalid_value")
