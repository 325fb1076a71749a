"""Log-probabilities in the two shapes that OpenAI's endpoints give them."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from atlas_core.vocab.messages import Position, TokenLogprob

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(positions: Iterable[Position], hidden: frozenset[int]) -> list[dict[str, Any]]:
    """Entries of ``logprobs.content``, one a token.

    ``bytes`` are those that a token adds to the answer, so that joined they are its text; null for ``hidden`` tokens, which add none.
    """
    return [{**_entry(p.chosen, hidden), "top_logprobs": [_entry(top, hidden) for top in p.top]} for p in positions]


class LegacyLogprobs:
    """The ``logprobs`` object of completions, piece by piece; the joined pieces are the object of the whole answer.

    ``text_offset`` is the number of characters before the one that a token begins or goes on with. An echoed prompt comes first.
    """

    def __init__(self, hidden: frozenset[int]) -> None:
        """``hidden`` are tokens that are not shown, and so take no room in the text."""
        self._hidden = hidden
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def piece(self, positions: Sequence[Position]) -> dict[str, list[Any]]:
        """What ``positions`` add."""
        return {
            "tokens": [_spelling(p.chosen) for p in positions],
            "token_logprobs": [_finite(p.chosen.logprob) for p in positions],
            "top_logprobs": [_alternatives(p) for p in positions],
            "text_offset": [self._advance(p.chosen) for p in positions],
        }

    def echoed(self, start: TokenLogprob, positions: Sequence[Position], echo: str) -> dict[str, list[Any]]:
        """What the prompt's tokens add, ``start`` and those of ``positions``; nothing comes before the first to tell it from."""
        tokens = [start, *(p.chosen for p in positions)]
        return {
            "tokens": [_spelling(token) for token in tokens],
            "token_logprobs": [None, *(_finite(p.chosen.logprob) for p in positions)],
            "top_logprobs": [None, *(_alternatives(p) for p in positions)],
            "text_offset": [self._echo(token, echo) for token in tokens],
        }

    def _echo(self, token: TokenLogprob, echo: str) -> int:
        # What the tokenizer put before the prompt, and no text of the client's, takes no room.
        at = self._offset
        if token.id not in self._hidden or echo.startswith(token.token, at):
            self._offset = min(len(echo), at + len(self._decoder.decode(token.bytes)))
        return at

    def _advance(self, token: TokenLogprob) -> int:
        at = self._offset
        if token.id not in self._hidden:
            self._offset += len(self._decoder.decode(token.bytes))
        return at


def prompt_logprobs(positions: Sequence[Position], count: int) -> list[dict[str, Any] | None]:
    """A prompt's tokens behind the first, each with ``count`` alternatives, by id, as vLLM shows them.

    ``rank`` is the place among the most likely, from 1, or null for a token that is beyond those that were looked at.
    """
    found: list[dict[str, Any] | None] = [None]
    for position in positions:
        entries = {str(top.id): _ranked(top, rank) for rank, top in enumerate(position.top[:count], 1)}
        chosen = position.chosen
        ranks = (rank for rank, top in enumerate(position.top, 1) if top.id == chosen.id)
        found.append({str(chosen.id): _ranked(chosen, next(ranks, None)), **entries})
    return found


def _ranked(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": _finite(token.logprob), "rank": rank, "decoded_token": token.token}


def _alternatives(position: Position) -> dict[str, float]:
    # The sampled token comes last, so that of two tokens spelt alike it is the one that is kept.
    return {_spelling(entry): _finite(entry.logprob) for entry in (*position.top, position.chosen)}


def _entry(token: TokenLogprob, hidden: frozenset[int]) -> dict[str, Any]:
    data = None if token.id in hidden else list(token.bytes)
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": data}


def _spelling(token: TokenLogprob) -> str:
    r"""The text of a token; ``bytes:\xe2\x80`` for one that is only part of a character, as these objects are keyed by text."""
    try:
        return token.bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def _finite(value: float) -> float:
    return max(FLOOR, value)  # in this order, NaN gives FLOOR too
