"""Token ids to text as they come, in constant time a token."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Text of one growing sequence of tokens.

    Bytes of an unfinished UTF-8 character are held back until they can be read; so the joined pieces equal the decode of the
    whole sequence, however the tokens arrive. Bytes that can never become a character give U+FFFD, as does a character
    cut off at the end.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """``token_bytes`` gives a token's own bytes; empty for tokens that are not shown."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty when it ends inside a character."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """The rest after the last token: one U+FFFD when a character was cut off, else nothing."""
        return self._decoder.decode(b"", final=True)
