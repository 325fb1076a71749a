"""One request's output: tokens in, what the client may see out.

Knows when the text ends, by token, string or length.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from atlas_core.contracts.dialect import ReasoningSyntax
from atlas_core.engine.failures import to_failure
from atlas_core.text.detokenize import Detokenizer
from atlas_core.text.dialect.thought import Part, Place, Thought
from atlas_core.text.stop import StopMatcher
from atlas_core.vocab.errors import AtlasError
from atlas_core.vocab.messages import Delta, FinishReason, Generate, Position, TokenLogprob


class TokenText(Protocol):
    """The part of a text.tokenizer.Tokenizer that turns ids into text."""

    def token_bytes(self, token: int) -> bytes:
        """A token's own bytes. Raises RequestError for an id that does not exist."""
        ...

    def detokenizer(self, *, skip_special: bool = True, shown: Collection[int] = ()) -> Detokenizer:
        """A detokenizer of one sequence; ``shown`` are control tokens that are not skipped."""
        ...


class Alternatives(NamedTuple):
    """Log-probabilities of one position: the sampled token first, then the best, best first; -1 ends a shorter list."""

    ids: Sequence[int]
    values: Sequence[float]


class Output:
    """Feed it every token once; the delta that it returns has ``finish`` when the request has ended.

    The token that ends a request counts as generated and stands in ``tokens``; its text and log-probability are shown
    only with ``include_stop_in_output``. Stop strings are looked for in the text after the first ``min_tokens`` tokens,
    and not inside a thought.
    """

    def __init__(self, request: Generate, eos: Iterable[int], text: TokenText) -> None:
        """Raises RequestError for an empty stop string. ``eos`` are the model's own end tokens."""
        params = request.sampling
        self.id = request.id
        self.started: float | None = None
        self.cached_tokens = 0
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
        self._params = params
        self._text = text
        self._prompt_tokens = len(request.prompt)
        self._count = 0
        self._detokenizer = text.detokenizer(skip_special=params.skip_special_tokens, shown=params.shown_tokens)
        asked = request.thinking
        self._thought = None if asked is None else Thought(ReasoningSyntax(asked.start, asked.end), opened=asked.opened)
        self._thought_tokens = 0
        self._stops = StopMatcher(params.stop, include=params.include_stop_in_output)
        self._scores: list[Position] = []

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._thought is not None and self._thought.place is Place.THOUGHT

    @property
    def thought_over(self) -> bool:
        """Whether there is no thought, or none any more, whatever comes."""
        return self._thought is None or self._thought.place is Place.ANSWER

    def push(self, token: int, alternatives: Alternatives | None, *, last: bool, whole: bool = False) -> Delta:
        """The delta of one token; ``last`` when no more may be generated, ``whole`` when the grammar allows no more.

        Raises RequestError for an id that does not exist.
        """
        if self._params.max_tokens == 0:
            return self._delta("length")  # only the prompt was of interest
        self._count += 1
        before = self.thinking
        stopping = token in self.stop_ids
        silent = stopping and not self._params.include_stop_in_output
        shown, hit = ("", None) if silent else self._show(self._detokenizer.push(token))
        if before or self.thinking:
            self._thought_tokens = self._count
        ends = stopping or whole
        if hit is None and (ends or last):
            rest, hit = self._show(self._detokenizer.finish(), final=True)
            shown += rest + ("" if hit else self._stops.finish())
        positions = () if silent or alternatives is None else (self._position(alternatives),)
        finish: FinishReason | None = "stop" if ends or hit is not None else "length" if last else None
        cause = hit if hit is not None else str(token) if stopping else None
        return self._delta(finish, (token,), shown, positions, cause)

    @property
    def untold(self) -> bool:
        """Whether there are log-probabilities of prompt tokens that no delta has had."""
        return bool(self._scores)

    def score(self, alternatives: Alternatives) -> None:
        """Log-probabilities of the next prompt token; they go out with the next delta."""
        self._scores.append(self._position(alternatives))

    def told(self) -> Delta:
        """A delta of nothing but log-probabilities of prompt tokens."""
        return self._delta(None)

    def abort(self) -> Delta:
        """The last delta of a request that somebody gave up."""
        return self._delta("abort")

    def fail(self, error: AtlasError) -> Delta:
        """The last delta of a request that cannot go on."""
        return self._delta("error", error=error)

    def _delta(
        self, finish: FinishReason | None, tokens: tuple[int, ...] = (), text: str = "",
        positions: tuple[Position, ...] = (), stop: str | None = None, error: AtlasError | None = None,
    ) -> Delta:  # fmt: skip
        failure = None if error is None else to_failure(error)
        scores, self._scores = tuple(self._scores), []
        return Delta(
            self.id, tokens, text, positions, finish, stop, self._prompt_tokens, self._count, self.cached_tokens, failure,
            reasoning_tokens=self._thought_tokens, started=self.started if self._count == 1 and tokens else None,
            prompt_logprobs=scores,
        )  # fmt: skip

    def _show(self, piece: str, *, final: bool = False) -> tuple[str, str | None]:
        """What of ``piece`` may be shown, and the stop string that it completed; ``final`` when nothing comes after it."""
        if self._thought is None:
            return self._show_answer(piece)
        parts: list[Part] = self._thought.push(piece)
        parts += self._thought.finish() if final else []
        shown = ""
        for part in parts:
            if part.place is Place.THOUGHT:
                shown += part.text
                continue
            text, hit = self._show_answer(part.text)
            shown += text
            if hit is not None:
                return shown, hit
        return shown, None

    def _show_answer(self, piece: str) -> tuple[str, str | None]:
        if self._count <= self._params.min_tokens:
            return piece, None
        match = self._stops.push(piece)
        return match.text, match.hit

    def _position(self, alternatives: Alternatives) -> Position:
        entries = [
            self._entry(token, value)
            for token, value in zip(alternatives.ids, alternatives.values, strict=True)
            if token >= 0
        ]
        return Position(entries[0], tuple(entries[1:]))

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        data = self._text.token_bytes(token)
        return TokenLogprob(token, data.decode("utf-8", errors="replace"), logprob, data)
