"""From the fields of a request to the values of the engine. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from atlas_core.server.schema import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    Request,
)
from atlas_core.server.turn import Prompt
from atlas_core.settings import Settings
from atlas_core.vocab.errors import CheckpointError, RequestError
from atlas_core.vocab.messages import Generate, Ready
from atlas_core.vocab.preset import ModelPreset
from atlas_core.vocab.sampling import SamplingParams

MAX_SCORES = 500_000
"""Log-probabilities of prompt tokens in one answer."""

_GENERATION_CONFIG: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
}
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def sampling_defaults(
    generation_config: Mapping[str, Any], preset: ModelPreset | None, settings: Settings | None = None
) -> dict[str, float | int]:
    """What holds when a request says nothing: what the operator's ``settings`` say, else what the model's ``preset`` advises, else the
    checkpoint's generation_config.json.
    """
    return {name: value for name, value, _ in sampling_sources(generation_config, preset, settings)}


def sampling_sources(
    generation_config: Mapping[str, Any], preset: ModelPreset | None, settings: Settings | None = None
) -> list[tuple[str, float | int, str]]:
    """(field of a request, default, who says so) of every field that has one; the others are neutral.

    Of generation_config.json temperature, top_p, top_k, min_p and repetition_penalty are read; it keeps lengths and beams to itself,
    which are the business of whoever asks. Raises CheckpointError for a value out of range.
    """
    given = _generation_config(generation_config)
    found = {name: (value, "generation_config.json") for name, value in given.items()}
    if preset:
        found |= {name: (value, f"preset {preset.name}") for name, value in preset.sampling}
    if settings:
        asked = {name: getattr(settings, f"default_{name}") for name in _SAMPLING}
        found |= {
            name: (value, str(settings.source(f"default_{name}"))) for name, value in asked.items() if value is not None
        }
    return [(name, *found[name]) for name in _SAMPLING if name in found]


def _generation_config(generation_config: Mapping[str, Any]) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for name, (low, high) in _GENERATION_CONFIG.items():
        value = generation_config.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise CheckpointError(
                f"generation_config.json: {name} is {value!r}",
                f"it must be a number from {low} to {high}",
                "correct the file",
            )
        found[name] = value
    return found


def sampling_params(request: Request, defaults: Mapping[str, float | int], info: Ready) -> SamplingParams:
    """The sampling parameters of ``request``: its own, else ``defaults``, else neutral.

    Raises RequestError for token ids outside the vocabulary, and for fields that contradict one another.
    """
    chosen: dict[str, Any] = {name: defaults[name] for name in _SAMPLING if name in defaults}
    chosen |= {name: getattr(request, name) for name in _SAMPLING if getattr(request, name) is not None}
    top_k = chosen.get("top_k", 0)
    chosen["top_k"] = top_k if 0 < top_k < info.vocab_size else 0
    limit = _max_tokens(request)
    least = request.min_tokens or 0
    if limit is not None and least > limit:
        raise _contradiction("min_tokens", f"{least} is more than the {limit} tokens that max_tokens allows")
    stop = request.stop
    return SamplingParams(
        **chosen,
        logit_bias=_logit_bias(request.logit_bias or {}, info.vocab_size),
        seed=request.seed,
        max_tokens=limit,
        min_tokens=least,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=check_ids(request.stop_token_ids or (), info.vocab_size, "stop_token_ids"),
        include_stop_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request),
    )


def ranked(request: Request) -> bool:
    """Whether more answers are generated than are given."""
    return isinstance(request, CompletionRequest) and request.best_of is not None and request.best_of > (request.n or 1)


def drawn(request: Request) -> int:
    """How many answers to each prompt are generated. Raises RequestError when the best of them cannot be given."""
    n = request.n or 1
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    if best_of is None or best_of == n:
        return n
    if best_of < n:
        raise _contradiction("best_of", f"{n} answers are asked for, and {best_of} would be generated")
    if request.stream:
        raise _contradiction(
            "best_of", "which answer is the best is known when all are there, and a stream begins before"
        )
    return best_of


def only_ranked(request: Request) -> bool:
    """Whether answers have log-probabilities that nobody asked for, to be ranked by."""
    return isinstance(request, CompletionRequest) and request.logprobs is None and ranked(request)


def sequences(
    prompts: Sequence[Prompt], n: int, sampling: SamplingParams, answer_id: str, arrival: float, space: str = ""
) -> tuple[Generate, ...]:
    """One Generate for each choice, prompt by prompt; ``arrival`` is monotonic time, seconds, ``space`` that of the prefix cache.

    Choice ``j`` of a seeded prompt has seed + j: choices differ, and each can be had alone. Without a seed the engine draws one each.
    """
    each = [
        sampling if sampling.seed is None else replace(sampling, seed=_wrapped(sampling.seed + j)) for j in range(n)
    ]
    pairs = [(prompt, one) for prompt in prompts for one in each]
    return tuple(
        Generate(f"{answer_id}-{index}", prompt.ids, one, arrival, prompt.grammar, prompt.thinking, space)
        for index, (prompt, one) in enumerate(pairs)
    )


def check_scores(prompts: Sequence[Prompt], n: int, sampling: SamplingParams) -> None:
    """Raises RequestError when log-probabilities of prompts would fill the memory: those of long ones with many alternatives."""
    each = 0 if sampling.prompt_logprobs is None else 1 + sampling.prompt_logprobs
    count = n * each * sum(len(prompt.ids) for prompt in prompts)
    if count > MAX_SCORES:
        raise RequestError(
            f"{count} log-probabilities of prompt tokens were asked for", f"an answer has at most {MAX_SCORES}",
            "send fewer or shorter prompts, or ask for fewer alternatives", field="prompt_logprobs", code="too_many_logprobs",
        )  # fmt: skip


def check_prompt(ids: Sequence[int], info: Ready, field: str, *, answered: bool = True) -> tuple[int, ...]:
    """``ids`` as a prompt, ``answered`` within the same context. Raises RequestError when there are none, too many, or ids of no token."""
    if not ids:
        raise RequestError(
            "the prompt has no tokens", "there is nothing to go on from", "send at least one token", field=field,
            code="empty_prompt",
        )  # fmt: skip
    if len(ids) + answered > info.max_seq_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the context size is {info.max_seq_len}",
            "prompt and answer share the context, and an answer needs one token at least" if answered else "nothing is cut off",
            "shorten the prompt, or start the server with a larger --max-seq-len",
            field=field, code="context_length_exceeded",
        )  # fmt: skip
    return check_ids(ids, info.vocab_size, field)


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """``ids`` as a tuple. Raises RequestError for the first that is no token of the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        index, token = next((index, token) for index, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise _no_token(token, vocab_size, f"{field}[{index}]")
    return tuple(ids)


def split_prompts(prompt: str | Sequence[str | int | list[int]], field: str = "prompt") -> list[str | list[int]]:
    """The prompts in the one ``field`` that may be a text, several, ids, or several lists of ids. Raises RequestError for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if len(kinds) != 1:
        raise RequestError(
            f"{field} mixes texts, ids and lists of ids", "which of them are prompts of their own cannot be told",
            "send one text, or a list of one kind", field=field, code="invalid_value",
        )  # fmt: skip
    if kinds == {int}:
        return [cast("list[int]", list(prompt))]
    return [part for part in prompt if not isinstance(part, int)]


def _max_tokens(request: Request) -> int | None:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    if isinstance(request, CompletionRequest) and request.max_tokens is None:
        return DEFAULT_COMPLETION_TOKENS
    return request.max_tokens


def _logprobs(request: Request) -> int | None:
    if isinstance(request, CompletionRequest):
        return 0 if only_ranked(request) else request.logprobs
    if not isinstance(request, ChatRequest) or not request.logprobs:
        if isinstance(request, ChatRequest) and request.top_logprobs:
            raise _contradiction("top_logprobs", "logprobs is not true")
        return None
    return request.top_logprobs or 0


def _prompt_logprobs(request: Request) -> int | None:
    """Alternatives of prompt tokens: as many as any part of the answer shows."""
    if request.prompt_logprobs is not None and request.stream:
        raise _contradiction("prompt_logprobs", "streams do not have them; completions with echo and logprobs do")
    wanted = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest):
        wanted += [request.logprobs] if request.echo else []
        if request.max_tokens == 0:
            if not request.echo and request.prompt_logprobs is None:
                raise _contradiction("max_tokens", "with 0 there is nothing to answer but an echo or prompt_logprobs")
            wanted.append(0)
    return max((count for count in wanted if count is not None), default=None)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = {}
    for name, value in bias.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 12):
            raise RequestError(
                f"logit_bias has the name {name[:64]!r}", "names are token ids, in decimal", "", field="logit_bias",
                code="invalid_value",
            )  # fmt: skip
        if int(name) >= vocab_size:
            raise _no_token(int(name), vocab_size, "logit_bias")
        pairs[int(name)] = value
    return tuple(sorted(pairs.items()))


def _wrapped(seed: int) -> int:
    """``seed`` as a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63


def _no_token(token: int, vocab_size: int, field: str) -> RequestError:
    return RequestError(
        f"token {token} does not exist", f"the vocabulary has {vocab_size} tokens", "send ids of this model's tokenizer",
        field=field, code="invalid_token",
    )  # fmt: skip


def _contradiction(field: str, why: str) -> RequestError:
    return RequestError(f"{field} contradicts the rest of the request", why, "", field=field, code="invalid_value")
