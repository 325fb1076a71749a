"""The internal turn: what every face makes of a request, and what comes back for it."""

from collections.abc import Iterable

from msgspec import Struct, field

from atlas_core.server.answer import Reading
from atlas_core.text.dialect.thought import Opening
from atlas_core.vocab.messages import Delta, FinishReason, Generate, Position, Thinking, TokenLogprob

UsageObject = dict[str, int | dict[str, int]]


class Prompt(Struct, frozen=True):
    """One prompt; ``echo`` is the text to put before its answers.

    ``start`` is its first token, where the log-probabilities of the others are shown. ``opening`` says whether it ends inside a thought. ``grammar`` and ``thinking`` are what Generate says of its answers.
    """

    ids: tuple[int, ...]
    echo: str = ""
    opening: Opening = "closed"
    grammar: str = ""
    thinking: Thinking | None = None
    start: TokenLogprob | None = None


class Turn(Struct, frozen=True):
    """One request, understood. Choice ``i`` is ``sequences[i]``; it answers ``prompts[i // n]``.

    ``hidden`` are the tokens whose text answers do not show. ``created`` is Unix time, seconds. ``fingerprint``
    identifies model, plugins and settings. ``prompt_logprobs`` is the number of alternatives in a list of that name.
    ``reading`` is how answers are taken apart into thoughts, text and calls. ``stops`` are the client's own stop
    strings. Of the ``n`` answers to a prompt the best ``kept`` are given, all if that is None; ``only_ranked``: they
    have log-probabilities for that alone.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    prompts: tuple[Prompt, ...]
    n: int
    sequences: tuple[Generate, ...]
    hidden: frozenset[int] = frozenset()
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False
    prompt_logprobs: int | None = None
    reading: Reading = field(default_factory=Reading)
    stops: tuple[str, ...] = ()
    kept: int | None = None
    only_ranked: bool = False

    def prompt_of(self, choice: int) -> Prompt:
        """The prompt that a choice answers."""
        return self.prompts[choice // self.n]

    @property
    def wants_logprobs(self) -> bool:
        """Whether answers carry log-probabilities."""
        return self.sequences[0].sampling.logprobs is not None and not self.only_ranked


class Output(Struct):
    """What one choice has gained so far."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    prompt_positions: list[Position] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, delta: Delta) -> None:
        """Take one delta."""
        self.pieces.append(delta.text)
        self.tokens += delta.tokens
        self.positions += delta.logprobs
        self.prompt_positions += delta.prompt_logprobs
        self.count(delta)

    def count(self, delta: Delta) -> None:
        """Take a delta's totals only: streams need no more."""
        self.finish = delta.finish
        self.stop = delta.stop
        self.prompt_tokens = delta.prompt_tokens
        self.completion_tokens = delta.completion_tokens
        self.cached_tokens = delta.cached_tokens
        self.reasoning_tokens = delta.reasoning_tokens

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


def usage(outputs: Iterable[Output], n: int) -> UsageObject:
    """OpenAI's usage object: every prompt counts once, however many answers were asked for."""
    outputs = list(outputs)
    prompt = sum(output.prompt_tokens for output in outputs[::n])
    completion = sum(output.completion_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        # Everything is kept without being asked, and nobody pays for it: 0, on every face.
        "prompt_tokens_details": {
            "cached_tokens": sum(output.cached_tokens for output in outputs[::n]),
            "cache_write_tokens": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": sum(output.reasoning_tokens for output in outputs)},
    }
