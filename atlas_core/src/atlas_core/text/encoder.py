"""A ``tokenizers`` tokenizer out of a tokenizer.json, and what can be known of its vocabulary without one."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from atlas_core.contracts.checkpoint import BpeTables, TokenizerSource
from atlas_core.text.vocabulary import Listed, Mapped, Vocabulary
from atlas_core.vocab.errors import CheckpointError

if TYPE_CHECKING:  # loaded with the first text that is encoded
    import tokenizers

CURE = "use a checkpoint whose tokenizer.json holds a byte-level or byte-fallback BPE or Unigram model"
_BPE_OPTIONS = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges",
)  # fmt: skip


class Added(Struct, frozen=True):
    """A token that stands beside the model's own: found in the text before anything else is."""

    content: str
    special: bool


class Tables(Struct, frozen=True):
    """Every token (added ones included), ``added`` by id, and the declared decoder."""

    vocabulary: Vocabulary
    added: Mapping[int, Added]
    decoder: Any


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Document(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] | None = None
    decoder: Any = None


def read_tables(source: TokenizerSource) -> Tables | None:
    """The vocabulary as the library will see it; None when only the library can tell. Merges are skipped, which is most of the text."""
    try:
        document = msgspec.json.decode(source.json, type=_Document)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None  # and the library finds the words for what is wrong
    vocab, listed = document.model.vocab, document.added_tokens or ()
    if source.tables is not None:
        return _listed(source.tables.tokens, listed, document.decoder)
    ids = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    added, free = {}, len(ids)
    for token in listed:
        # The library does not take the number from here: it looks the token up, and counts on from the model's own.
        if ids.setdefault(token.content, free) != token.id or token.id in added:
            return None
        free += token.id == free
        added[token.id] = Added(token.content, token.special)
    return Tables(Mapped(ids), added, document.decoder)


def _listed(tokens: Sequence[str], listed: Sequence[_AddedToken], decoder: Any) -> Tables | None:
    """Of tokens that stand in the order of their numbers; None where the library would number an added one otherwise."""
    added: dict[int, Added] = {}
    for token in listed:
        if token.id in added or not 0 <= token.id < len(tokens) or tokens[token.id] != token.content:
            return None
        added[token.id] = Added(token.content, token.special)
    return Tables(Listed(tokens, {number: token.content for number, token in added.items()}), added, decoder)


def tables_of(encoder: "tokenizers.Tokenizer", source: TokenizerSource) -> Tables:
    """The same by asking the library."""
    added = {token: Added(entry.content, entry.special) for token, entry in encoder.get_added_tokens_decoder().items()}
    ids = encoder.get_vocab(with_added_tokens=True)
    return Tables(Mapped(ids), added, msgspec.json.decode(source.json).get("decoder"))


def build_encoder(source: TokenizerSource) -> "tokenizers.Tokenizer":
    """The tokenizer. Raises CheckpointError when the tokenizer.json is not understood."""
    import tokenizers

    try:
        if source.tables is not None:
            return _plain(_from_tables(source.json, source.tables))
        return _plain(tokenizers.Tokenizer.from_str(source.json))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError("tokenizer.json is not understood", str(error), CURE) from error


def without_special(encoder: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    """One that shares the model and takes control tokens in a text for ordinary characters."""
    added = sorted(encoder.get_added_tokens_decoder().items())
    literal = _plain(_assembled(encoder.model, encoder, [token for _, token in added]))
    literal.encode_special_tokens = True
    return literal


def _from_tables(text: str, tables: BpeTables) -> "tokenizers.Tokenizer":
    """What the text would give with these tables in it. Writing them into it, and reading them there, takes four times as long."""
    import tokenizers

    document = msgspec.json.decode(text)
    vocabulary = {token: number for number, token in enumerate(tables.tokens)}
    if len(vocabulary) != len(tables.tokens):
        raise CheckpointError(
            "the tokenizer has the same token twice", f"{len(tables.tokens)} are listed, {len(vocabulary)} differ", CURE
        )
    options = {name: document["model"][name] for name in _BPE_OPTIONS if document["model"].get(name) is not None}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=list(tables.merges()), **options)
    added = [
        tokenizers.AddedToken(**{key: value for key, value in token.items() if key != "id"})
        for token in document.get("added_tokens") or ()
    ]
    # The model's tokens are not in the text, so neither may be what refers to them.
    document["added_tokens"], document["model"]["unk_token"] = [], None
    return _assembled(model, tokenizers.Tokenizer.from_str(msgspec.json.encode(document).decode()), added)


def _assembled(
    model: Any, other: "tokenizers.Tokenizer", added: "Sequence[tokenizers.AddedToken]"
) -> "tokenizers.Tokenizer":
    """A tokenizer of ``model`` that treats text as ``other`` does."""
    import tokenizers

    made = tokenizers.Tokenizer(model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(other, part) is not None:
            setattr(made, part, getattr(other, part))
    made.add_tokens(list(added))
    return made


def _plain(tokenizer: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    # Some checkpoints carry training settings here, which would cut or pad every prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
