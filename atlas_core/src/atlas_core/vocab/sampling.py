"""How the next token is chosen. Neutral defaults: nothing changes the model's distribution unless asked."""

from msgspec import Struct

MAX_TOP_LOGPROBS = 20


class SamplingParams(Struct, frozen=True):
    """Parameters of one sequence. Values are already validated by the face that read them.

    Order of application: logit_bias and mask, repetition, frequency and presence penalties, temperature, top_k,
    top_p, min_p. ``temperature`` 0 takes the largest logit (lowest id on ties). ``top_k`` 0 is off. ``seed`` None lets the
    engine draw one. ``max_tokens`` None means up to the context size. ``logprobs`` None is off, else the number
    (0 to 20) of alternatives beside the sampled token; values are those of the unmodified distribution.
    ``prompt_logprobs`` asks the same of every prompt token but the first; only with it ``max_tokens`` may be 0, and nothing is generated.
    ``shown_tokens`` are control tokens whose text is shown even if ``skip_special_tokens`` hides that of the others.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    shown_tokens: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether no randomness is involved."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the counts of earlier tokens are needed."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
