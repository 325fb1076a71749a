"""Grammars over the model's vocabulary: compiled on a thread of their own, one matcher for each sequence."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from atlas_core.vocab.errors import AtlasError, EngineError, RequestError

if TYPE_CHECKING:  # loaded with the first grammar: most engines never see one
    from llguidance import LLMatcher, LLTokenizer

Row = npt.NDArray[np.uint32]
_KEPT = 64
"""Compiled grammars that are remembered; a copy of one costs next to nothing."""


class Vocabulary(Protocol):
    """The part of a text.tokenizer.Tokenizer that says what tokens are."""

    @property
    def special_ids(self) -> Collection[int]:
        """Control tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """A token's own bytes."""
        ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``."""
        ...


class Matcher:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    @property
    def done(self) -> bool:
        """Whether the output is whole, and nothing more may come."""
        return self._matcher.is_stopped()

    @property
    def failure(self) -> str:
        """Why the grammar cannot go on; empty when it can."""
        return self._matcher.get_error()

    def fill(self, row: Row) -> None:
        """Write the mask of the next token: bit ``token % 32`` of word ``token // 32``, uint32 [ceil(vocabulary / 32)].

        Bits beyond the vocabulary mean nothing. A matcher that fails allows everything: ``failure`` tells, and the token is not to be used.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(row)]
        if self._matcher.is_error():
            row.fill(0xFFFFFFFF)
            return
        row[: len(mask)] = mask
        row[len(mask) :] = 0

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        return self._matcher.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """Go on by a token; one that the mask did not allow makes it fail."""
        self._matcher.consume_token(token)


class Grammars:
    """Compiles. ``eos`` are the tokens that may end an output that is whole; ``size`` counts the model's logits."""

    def __init__(self, vocabulary: Vocabulary, eos: Sequence[int], size: int) -> None:
        self._vocabulary = vocabulary
        self._eos = tuple(eos)
        self._size = size
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[str, frozenset[int]], LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "atlas-grammar")

    def prepare(self) -> None:
        """Begin to build what every grammar needs of the vocabulary: a second for 150,000 tokens, in which no Python runs."""
        self._thread.submit(self._tokenizer, frozenset())

    def compile(
        self, grammar: str, shown: Collection[int], done: Callable[["Future[Matcher]"], None]
    ) -> "Future[Matcher]":
        """Compile ``grammar``, then call ``done`` on another thread. ``shown`` are control tokens that count as text.

        The future has RequestError for a grammar that is not valid; cancelled before its turn comes, it costs nothing.
        """
        compiling = self._thread.submit(self._matcher, grammar, frozenset(shown))
        compiling.add_done_callback(done)
        return compiling

    def close(self) -> None:
        """End the thread; what waits is not compiled any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _matcher(self, grammar: str, shown: frozenset[int]) -> Matcher:
        key = grammar, shown
        known = self._compiled.get(key)
        if known is None:
            from llguidance import LLMatcher

            known = LLMatcher(self._tokenizer(shown), grammar, log_level=0)
            if known.is_error():
                raise RequestError(
                    "the answer's grammar cannot be used with this model", known.get_error()[:500], "simplify it",
                    code="invalid_grammar",
                )  # fmt: skip
            self._compiled[key] = known
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return Matcher(known.deep_copy())

    def _tokenizer(self, shown: frozenset[int]) -> "LLTokenizer":
        found = self._tokenizers.get(shown)
        if found is None:
            found = self._tokenizers[shown] = _table(self._vocabulary, self._eos, self._size, shown)
        return found


class _Table:
    """What llguidance asks of a tokenizer.

    It tokenises text that a grammar leaves no choice about, so that the model is led to the tokens that it knows it by.
    """

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes], eos: int, special: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos
        self.bos_token_id: int | None = None
        self.special_token_ids = special
        self._vocabulary = vocabulary
        hidden = frozenset(special)
        self._ids = {text: token for token, text in enumerate(tokens) if token not in hidden}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """Tokens whose bytes are exactly ``data``; the tokenizer's own wherever its text begins with no blank of its making."""
        try:
            ids = self._vocabulary.encode(data.decode(), add_special=False, parse_special=False)
        except (UnicodeDecodeError, AtlasError):
            return self._greedy(data)
        if max(ids, default=0) >= len(self.tokens) or b"".join(self.tokens[token] for token in ids) != data:
            return self._greedy(data)
        return ids

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place; bytes that no token has are left out, and llguidance then forces nothing there."""
        ids, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                break
        return ids


def _table(vocabulary: Vocabulary, eos: Sequence[int], size: int, shown: frozenset[int]) -> "LLTokenizer":
    """The model's vocabulary; ids without text are control tokens, which no grammar allows.

    A model that has no token to end with gets one more that it cannot choose.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    known = min(size, vocabulary.vocab_size)
    tokens = [vocabulary.token_bytes(token) for token in range(known)] + [b""] * (size - known)
    ends = [token for token in eos if token < size]
    if not ends:
        tokens.append(b"")
        ends = [size]
    control = (set(vocabulary.special_ids) | set(ends)) - (shown - set(ends))
    special = sorted(token for token, text in enumerate(tokens) if token in control or not text)
    names = [text or f"<{token}>".encode() for token, text in enumerate(tokens)]
    try:
        return LLTokenizer(
            TokenizerWrapper(_Table(vocabulary, names, ends[0], special)), n_vocab=len(names), eos_token=ends
        )
    except ValueError as error:
        raise EngineError("this model's vocabulary cannot be used with grammars", str(error)) from error
