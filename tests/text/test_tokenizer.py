import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.contracts.checkpoint import BpeTables, TokenizerSource
from atlas_core.loading.directory import ModelDirectory
from atlas_core.text.encoder import build_encoder, read_tables, without_special
from atlas_core.text.tokenizer import Tokenizer
from atlas_core.vocab.errors import CheckpointError, RequestError

TINY = (Path(__file__).parents[1] / "data" / "tiny" / "llama" / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = Tokenizer(TokenizerSource(TINY, {}, {"eos_token": "<|im_end|>"}))


def pieces(**changes):
    """A byte-fallback tokenizer in the manner of SentencePiece."""
    vocab = {"<unk>": 0, "<s>": 1, "<0xC3>": 2, "<0xA9>": 3, "▁": 4, "a": 5, "▁a": 6, "b": 7}
    return {
        "version": "1.0", "truncation": None, "padding": None, "pre_tokenizer": None, "post_processor": None,
        "added_tokens": [
            {"id": 1, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True},
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
                  "merges": [["▁", "a"]]},
        **changes,
    }  # fmt: skip


def fallback(*, add_bos=False, **changes):
    special = {"bos_token": "<s>"} if add_bos else {}
    return Tokenizer(TokenizerSource(json.dumps(pieces(**changes)), {}, special, add_bos))


def test_special_ids_and_sizes():
    assert TOKENIZER.eos_id == 498
    assert TOKENIZER.bos_id is None
    assert TOKENIZER.vocab_size == 512
    assert TOKENIZER.special_ids == frozenset(range(496, 512))


def test_control_tokens_only_when_asked_for():
    assert TOKENIZER.encode("a<|im_end|>")[-1] == 498
    literal = TOKENIZER.encode("a<|im_end|>", parse_special=False)
    assert not TOKENIZER.special_ids & set(literal)
    assert TOKENIZER.decode(literal) == "a<|im_end|>"


@given(st.text(max_size=40))
def test_round_trip_without_control_tokens(text):
    ids = TOKENIZER.encode(text, parse_special=False)
    assert not TOKENIZER.special_ids & set(ids)
    composed = tokenizers.normalizers.NFC().normalize_str(text)
    assert TOKENIZER.decode(ids) == composed
    detokenizer = TOKENIZER.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == composed


@given(st.lists(st.integers(0, 511), max_size=20), st.booleans())
def test_decoding_equals_the_library_s(ids, skip):
    library = tokenizers.Tokenizer.from_str(TINY)
    assert TOKENIZER.decode(ids, skip_special=skip) == library.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens():
    assert TOKENIZER.token_bytes(498) == b"<|im_end|>"
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode("é 好"))) == "é 好".encode()
    assert TOKENIZER.token_id("<|im_start|>") == 497
    for outside in (-1, 512):
        with pytest.raises(RequestError, match="does not exist"):
            TOKENIZER.token_bytes(outside)


def test_byte_fallback():
    tokenizer = fallback()
    assert tokenizer.encode("aé a", add_special=False) == [6, 2, 3, 6]
    assert tokenizer.token_bytes(2) == b"\xc3"
    assert tokenizer.decode([6, 2, 3, 6], start=True) == "aé a"
    assert tokenizer.decode([6, 2, 3, 6]) == " aé a"
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(token) for token in (6, 2, 3)] == [" a", "", "é"]


def test_bos_is_added_once():
    assert fallback().encode("a") == [6]
    assert fallback(add_bos=True).encode("a") == [1, 6]
    assert fallback(add_bos=True).encode("a", add_special=False) == [6]
    assert fallback(add_bos=True).encode("<s>a") == [1, 6]


def test_metaspace():
    tokenizer = fallback(decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True})
    assert tokenizer.decode([6, 6], start=True) == "a a"


def test_settings_of_training_do_not_cut_prompts():
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert fallback(truncation=cut).encode("a a a a", add_special=False) == [6, 6, 6, 6]


def test_half_a_character_is_refused():
    with pytest.raises(RequestError) as caught:
        TOKENIZER.encode("half: \ud83c")
    assert caught.value.code == "invalid_unicode"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (TokenizerSource("{}", {}, {}), "tokenizer.json is not understood"),
        (TokenizerSource(TINY, {}, {"eos_token": "<never>"}), "not in the vocabulary"),
        (TokenizerSource(TINY, {}, {}, add_bos=True), "names none"),
        (
            TokenizerSource(json.dumps(pieces(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})), {}, {}),
            "decoder",
        ),
        (TokenizerSource(json.dumps(pieces(decoder=None)), {}, {}), "decoder is not known"),
    ],
)
def test_what_is_not_understood(source, said):
    with pytest.raises(CheckpointError, match=said):
        Tokenizer(source)


@pytest.mark.parametrize(
    "folder", sorted((Path(__file__).parents[1] / "data/tiny").iterdir()), ids=lambda path: path.name
)
def test_a_lazy_tokenizer_knows_the_same_before_and_after_it_encodes(folder):
    source = ModelDirectory(folder).tokenizer()
    eager, lazy = Tokenizer(source), Tokenizer(source, lazy=True)
    assert read_tables(source) is not None
    for _ in range(2):
        assert lazy.vocab_size == eager.vocab_size
        assert lazy.special_ids == eager.special_ids
        assert [lazy.token_bytes(token) for token in range(lazy.vocab_size)] == [
            eager.token_bytes(token) for token in range(eager.vocab_size)
        ]
        assert lazy.encode("Hello <|im_end|> wörld") == eager.encode("Hello <|im_end|> wörld")


@pytest.mark.parametrize(
    "added",
    [[{"id": 3, "content": "<x>"}], [{"id": 400, "content": "<x>"}], [{"id": 260, "content": "a"}]],
    ids=["taken", "beyond", "spelt twice"],
)
def test_tokens_whose_numbers_contradict_the_vocabulary_are_left_to_the_library(added):
    changed = pieces(
        added_tokens=[
            {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False), **entry}
            for entry in added
        ]
    )
    source = TokenizerSource(json.dumps(changed), {}, {})
    assert read_tables(source) is None
    assert Tokenizer(source, lazy=True).token_id(added[0]["content"]) == Tokenizer(source).token_id(added[0]["content"])


def test_a_model_in_tables_is_the_one_in_text():
    document = json.loads(TINY)
    model = document["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    assert [model["vocab"][token] for token in tokens] == list(range(len(tokens)))
    tables = BpeTables(
        tokens, lambda: [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    )
    bare = json.dumps(document | {"model": model | {"vocab": {}, "merges": []}})
    apart = build_encoder(TokenizerSource(bare, {}, {}, tables=tables))
    whole = build_encoder(TokenizerSource(TINY, {}, {}))
    assert apart.to_str() == whole.to_str()
    literal = without_special(apart)
    assert literal.to_str() == whole.to_str()
    assert literal.encode("<|im_end|>").ids != whole.encode("<|im_end|>").ids


def test_tokens_in_the_order_of_their_numbers_are_the_vocabulary():
    document = json.loads(TINY)
    vocab = document["model"]["vocab"]
    added = [token["content"] for token in sorted(document["added_tokens"], key=lambda token: token["id"])]
    tokens = sorted(vocab, key=vocab.__getitem__) + added
    bare = json.dumps(document | {"model": document["model"] | {"vocab": {}, "merges": []}})
    made = Tokenizer(TokenizerSource(bare, {}, {}, tables=BpeTables(tokens, list)), lazy=True)
    assert made.vocab_size == len(tokens)
    assert [made.token_id(token) for token in tokens] == list(range(len(tokens)))
    assert made.token_id("<never>") is None
    for outside in (-1, len(tokens)):
        with pytest.raises(RequestError, match="does not exist"):
            made.token_bytes(outside)
    whole = Tokenizer(TokenizerSource(TINY, {}, {}))
    assert [made.token_bytes(number) for number in range(len(tokens))] == [
        whole.token_bytes(number) for number in range(len(tokens))
    ]


def test_a_token_that_is_listed_twice_is_refused_when_a_text_is_encoded():
    document = json.loads(TINY)
    bare = json.dumps(document | {"model": document["model"] | {"vocab": {}, "merges": []}, "added_tokens": []})
    with pytest.raises(CheckpointError, match="same token twice"):
        build_encoder(TokenizerSource(bare, {}, {}, tables=BpeTables(["a", "b", "a"], list)))
