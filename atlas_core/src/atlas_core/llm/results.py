"""What comes back for a prompt."""

from msgspec import Struct, field

from atlas_core.vocab.messages import Delta, FinishReason, Position
from atlas_core.vocab.sampling import SamplingParams


class Usage(Struct, frozen=True):
    """Tokens: of the prompt, of the answer, and of the prompt those that a cache spared."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Result(Struct, frozen=True):
    """One answer. ``index`` is the prompt that it answers, in the order given.

    ``token_ids`` include the one that ended it, if any; ``text`` does not show it. ``finish_reason`` is stop or length.
    ``stop_reason`` is the stop string, or the token id in decimal, that ended it. ``logprobs`` has one position a token, and
    ``prompt_logprobs`` one for each prompt token but the first; None unless asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    prompt_token_ids: tuple[int, ...]
    stop_reason: str | None = None
    logprobs: tuple[Position, ...] | None = None
    prompt_logprobs: tuple[Position, ...] | None = None


class Gathered(Struct):
    """Deltas of one sequence, put together."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    prompt_positions: list[Position] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Take one delta."""
        self.pieces.append(delta.text)
        self.tokens += delta.tokens
        self.positions += delta.logprobs
        self.prompt_positions += delta.prompt_logprobs

    def result(self, index: int, prompt: tuple[int, ...], last: Delta, sampling: SamplingParams) -> Result:
        """The answer to what ``sampling`` asked for; ``last`` is the delta with ``finish``. Raises ValueError when it has none."""
        if last.finish is None:
            raise ValueError("the sequence goes on")
        return Result(
            index, "".join(self.pieces), tuple(self.tokens), last.finish,
            Usage(last.prompt_tokens, last.completion_tokens, last.cached_tokens), prompt, last.stop,
            None if sampling.logprobs is None else tuple(self.positions),
            None if sampling.prompt_logprobs is None else tuple(self.prompt_positions),
        )  # fmt: skip
