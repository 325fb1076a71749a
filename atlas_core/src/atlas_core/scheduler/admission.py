"""From a request to a sequence: everything that can be wrong with it is found here, before it costs anything."""

import struct
from collections.abc import Iterable

from atlas_core.ops.step import Word
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.sequence import Sequence
from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import MAX_TOP_LOGPROBS, SamplingParams

NEVER = float("-inf")


def accept(request: Generate, order: int, *, seed: int, stop_ids: Iterable[int], limits: Limits) -> Sequence:
    """The sequence that ``request`` asks for.

    ``seed`` is the one to use; ``stop_ids`` end it, and are forbidden before ``min_tokens``.

    Raises RequestError when it can never run.
    """
    params = request.sampling
    length = len(request.prompt)
    if not length:
        raise RequestError(
            "the prompt has no tokens", "there is nothing to continue", "send at least one", field="prompt"
        )
    if length + (not request.embed) > limits.max_seq_len:
        raise RequestError(
            f"the prompt has {length} tokens and the context is {limits.max_seq_len}",
            "it would be cut off" if request.embed else "at least one place is needed for the answer",
            "shorten the prompt, or start the server with a larger --max-seq-len",
            field="prompt",
            code="context_length_exceeded",
        )
    least = 1 if params.prompt_logprobs is None and not request.embed else 0
    if params.max_tokens is not None and params.max_tokens < least:
        raise RequestError(f"max_tokens is {params.max_tokens}", "an answer has at least one token", field="max_tokens")
    for wanted, field in ((params.logprobs, "top_logprobs"), (params.prompt_logprobs, "prompt_logprobs")):
        if wanted is not None and not 0 <= wanted <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"{wanted} alternatives were asked for", f"0 to {MAX_TOP_LOGPROBS} are given", field=field
            )
    room = limits.max_seq_len - length
    banned = sorted(set(stop_ids)) if params.min_tokens > 0 else []
    _check_tokens("prompt", request.prompt, limits)
    _check_tokens("logit_bias", (token for token, _ in params.logit_bias), limits)
    _check_tokens("stop_token_ids", params.stop_token_ids, limits)
    values = [(token, value, "logit_bias") for token, value in params.logit_bias]
    pairs = tuple(
        (token, float_bits(value, name)) for token, value, name in [*values, *((t, NEVER, "") for t in banned)]
    )
    _check_pools(params, len(pairs), limits)
    return Sequence(
        id=request.id,
        order=order,
        prompt_length=length,
        tokens=list(request.prompt),
        # A prompt that is only scored or embedded samples a token too: its last one has to be computed all the same.
        max_new=room if params.max_tokens is None else max(1, min(room, params.max_tokens)),
        min_new=params.min_tokens,
        fields=_fields(params, length, seed, limits),
        pairs=pairs,
        banned=len(banned),
        penalised=params.penalised,
        scoring=params.prompt_logprobs,
        space=request.space,
    )


def float_bits(value: float, field: str) -> int:
    """The bits of a float32, as an unsigned number.

    Raises RequestError naming ``field`` when there is no such float32.
    """
    try:
        bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        raise RequestError(f"{field} {value!r} is out of range", "it is no 32-bit float", field=field) from None
    return bits


def _fields(params: SamplingParams, length: int, seed: int, limits: Limits) -> dict[Word, int]:
    """Slot words that stay the same wherever the sequence runs."""
    return {
        Word.LAST_TOKEN: 0,
        Word.POSITION: 0,
        Word.PROMPT_LENGTH: length,
        Word.TEMPERATURE: float_bits(params.temperature, "temperature"),
        Word.TOP_P: float_bits(params.top_p, "top_p"),
        Word.TOP_K: params.top_k if 0 < params.top_k < limits.vocab_size else 0,
        Word.MIN_P: float_bits(params.min_p, "min_p"),
        Word.PRESENCE: float_bits(params.presence_penalty, "presence_penalty"),
        Word.FREQUENCY: float_bits(params.frequency_penalty, "frequency_penalty"),
        Word.REPETITION: float_bits(params.repetition_penalty, "repetition_penalty"),
        Word.SEED_LOW: seed & 0xFFFFFFFF,
        Word.SEED_HIGH: seed >> 32 & 0xFFFFFFFF,
        Word.LOGPROBS: -1 if params.logprobs is None else params.logprobs,
        Word.MASK: 0,
    }


def _check_tokens(name: str, tokens: Iterable[int], limits: Limits) -> None:
    found = tuple(tokens)
    if found and not 0 <= min(found) <= max(found) < limits.vocab_size:
        token = next(token for token in found if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"{name} names token {token}",
            f"the vocabulary has {limits.vocab_size} tokens",
            "send ids of this model's tokenizer",
            field=name,
            code="invalid_token",
        )


def _check_pools(params: SamplingParams, pairs: int, limits: Limits) -> None:
    if pairs > limits.layout.bias_pairs:
        raise RequestError(
            f"the request needs {pairs} logit bias entries and there are {limits.layout.bias_pairs}",
            "min_tokens takes one entry for each token that may end the text, beside those of logit_bias",
            "send a shorter logit_bias",
            field="logit_bias",
            kind="unsupported",
        )
    if params.penalised and not limits.penalty_rows:
        raise RequestError(
            "presence, frequency and repetition penalties are off on this server",
            "it was started without memory for token counts",
            "leave the penalties out, or give the server penalty rows",
            kind="unsupported",
        )
