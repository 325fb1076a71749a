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

    ``text_offset`` is the number of characters before the one that a token begins or goes on with.
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

    def _advance(self, token: TokenLogprob) -> int:
        at = self._offset
        if token.id not in self._hidden:
            self._offset += len(self._decoder.decode(token.bytes))
        return at


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
