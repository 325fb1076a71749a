"""Text to token ids and back, over one tokenizer.json."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from atlas_core.contracts.checkpoint import TokenizerSource
from atlas_core.text.detokenize import Detokenizer
from atlas_core.text.encoder import CURE as _CURE
from atlas_core.text.encoder import build_encoder, read_tables, tables_of, without_special
from atlas_core.vocab.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A ``tokenizers`` tokenizer with byte-exact decoding.

    Decoding is the concatenation of every token's own bytes read as UTF-8, so it may be cut anywhere (see Detokenizer).
    """

    def __init__(self, source: TokenizerSource, *, lazy: bool = False) -> None:
        """Raises CheckpointError when the tokenizer.json is not understood.

        ``lazy`` leaves what only ``encode`` needs, most of the work, to its first call.
        """
        self._source = source
        self._encoder: tokenizers.Tokenizer | None = None
        self._literal: tokenizers.Tokenizer | None = None
        tables = read_tables(source) if lazy else None
        if tables is None:
            tables = tables_of(self._encoding(), source)
        self._vocabulary = tables.vocabulary
        self._added = {number: token.content for number, token in tables.added.items()}
        self.special_ids = frozenset(number for number, token in tables.added.items() if token.special)
        self.special_tokens = frozenset(self._added[token] for token in self.special_ids)
        self._to_bytes, self._strips_blank = _decoder(tables.decoder)
        self._cache: dict[int, bytes] = {}
        self.vocab_size = tables.vocabulary.size
        self.bos_id = self._special(source, "bos_token")
        self.eos_id = self._special(source, "eos_token")
        if source.add_bos and self.bos_id is None:
            raise CheckpointError(
                "the tokenizer asks for a token at the beginning of every text and names none",
                "add_bos_token is set and bos_token is not",
                "set bos_token in tokenizer_config.json, or add_bos_token to false",
            )
        self._add_bos = source.add_bos

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds what the tokenizer puts round a text (usually bos). With ``parse_special`` false, text that
        spells a special token (``<|im_end|>``) is encoded as ordinary characters: no user can write a control token.
        Raises RequestError when the text is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text is not valid Unicode",
                f"character {error.start} is half of a surrogate pair",
                "send whole characters",
                code="invalid_unicode",
            ) from None
        tokenizer = self._encoding() if parse_special else self._without_special()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special).ids
        if add_special and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, start: bool = False) -> str:
        """Text of ``ids``; bytes that are no UTF-8 give U+FFFD. Raises RequestError for an id outside the vocabulary.

        ``start`` says that the ids begin a text, so that the blank which some tokenizers put before it is taken away.
        """
        data = b"".join(self._shown(token, skip_special) for token in ids)
        if start and self._strips_blank:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def detokenizer(self, *, skip_special: bool = True, shown: Collection[int] = ()) -> Detokenizer:
        """A detokenizer whose joined pieces equal ``decode`` of all ids; ``shown`` are control tokens that are not skipped."""
        return Detokenizer(lambda token: self._shown(token, skip_special and token not in shown))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character; for added tokens, their spelling.

        Ids below ``vocab_size`` without a token (padding of the embedding) have none. Raises RequestError beyond it.
        """
        known = self._cache.get(token)
        if known is None:
            known = self._cache[token] = self._bytes_of(token)
        return known

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self._vocabulary.number(token)

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8")
        spelling = self._vocabulary.spelling(token)
        if spelling is not None:
            return self._to_bytes(spelling)
        if 0 <= token < self.vocab_size:
            return b""
        raise RequestError(
            f"token {token} does not exist",
            f"the vocabulary has {self.vocab_size} tokens",
            "send ids of this model's tokenizer",
            code="invalid_token",
        )

    def _shown(self, token: int, skip_special: bool) -> bytes:
        return b"" if skip_special and token in self.special_ids else self.token_bytes(token)

    def _encoding(self) -> "tokenizers.Tokenizer":
        # Two threads that are first at once both build it, and either result is good.
        if self._encoder is None:
            self._encoder = build_encoder(self._source)
        return self._encoder

    def _without_special(self) -> "tokenizers.Tokenizer":
        # A tokenizer of its own: switching the shared one would race with other threads' encode.
        if self._literal is None:
            self._literal = without_special(self._encoding())
        return self._literal

    def _special(self, source: TokenizerSource, role: str) -> int | None:
        spelling = source.special.get(role)
        if spelling is None:
            return None
        token = self.token_id(spelling)
        if token is None:
            raise CheckpointError(
                f"{role} {spelling!r} is not in the vocabulary",
                "tokenizer_config.json and tokenizer.json contradict each other",
                "use the two files of one model",
            )
        return token


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 characters stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def _decoder(declared: Any) -> tuple[Callable[[str], bytes], bool]:
    """From tokenizer.json's ``decoder``: a token's spelling → its bytes, and whether a text's first blank is not its own."""
    steps = declared.get("decoders", [declared]) if isinstance(declared, dict) else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(_byte_level_alphabet()), False
    if kinds and all(kind in {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} for kind in kinds):
        replacements: list[tuple[str, str]] = []
        strips = False
        for step in steps:
            if step["type"] == "Replace":
                pattern = step["pattern"]
                if "String" not in pattern:
                    raise CheckpointError(
                        "the tokenizer's decoder replaces by a regular expression", str(pattern), _CURE
                    )
                replacements.append((pattern["String"], step["content"]))
            elif step["type"] == "Metaspace":
                replacements.append((step["replacement"], " "))
                strips = strips or step.get("prepend_scheme", "always") != "never"
            elif step["type"] == "Strip":
                if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                    raise CheckpointError("the tokenizer's decoder strips more than one first blank", str(step), _CURE)
                strips = True
        return _byte_fallback(replacements, fallback="ByteFallback" in kinds), strips
    raise CheckpointError("the tokenizer's decoder is not known", f"it is {kinds or declared}", _CURE)


def _byte_level(alphabet: dict[str, int]) -> Callable[[str], bytes]:
    def to_bytes(spelling: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in spelling])
        except KeyError:
            return spelling.encode("utf-8")

    return to_bytes


def _byte_fallback(replacements: list[tuple[str, str]], *, fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(spelling: str) -> bytes:
        if fallback and len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            try:
                return bytes.fromhex(spelling[3:5])
            except ValueError:
                pass  # a token that only looks like a byte: written as it is spelt
        for old, new in replacements:
            spelling = spelling.replace(old, new)
        return spelling.encode("utf-8")

    return to_bytes
