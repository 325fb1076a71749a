import json
from pathlib import Path

import pytest

from atlas_core.text.encoder import build_encoder
from atlas_core.vocab.errors import CheckpointError
from atlas_quant_gguf.tokenizer import tokenizer_source

PATH = Path("toy.gguf")


def encode(source, text):
    return build_encoder(source).encode(text).tokens


def test_byte_level_with_single_digits(metadata):
    source = tokenizer_source(metadata(), PATH)
    assert encode(source, "hell 12<|end|>é") == ["he", "ll", "Ġ", "1", "2", "<|end|>", "Ã", "©"]
    assert source.special == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert source.chat_templates == {"default": "{{ messages[0].content }}"}
    assert not source.add_bos


def test_named_templates(metadata):
    source = tokenizer_source({**metadata(), "tokenizer.chat_template.tool_use": "tools"}, PATH)
    assert source.chat_templates["tool_use"] == "tools"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 123 b", ["a", "Ġ", "1", "2", "3", "Ġb"]),
        ("gpt-2", "a 123 b", ["a", "Ġ123", "Ġb"]),
        ("llama-bpe", "a 1234 b", ["a", "Ġ", "123", "4", "Ġb"]),
        ("qwen2", "a 12 b", ["a", "Ġ", "1", "2", "Ġb"]),
        ("qwen2", "ab\u0941c", ["ab", "à¥ģc"]),  # a mark between letters
        ("qwen35", "ab\u0941c 12", ["abà¥ģc", "Ġ", "1", "2"]),
        ("default", "a 1234. b", ["a", "Ġ", "123", "4", ".", "Ġb"]),
        ("llama-bpe", "DON'T x\n\n y", ["DON", "'T", "Ġx", "ĊĊ", "Ġy"]),
        ("gpt-2", "DON'T x\n\n y", ["DON", "'", "T", "Ġx", "ĊĊ", "Ġy"]),
    ],
)
def test_pre_tokenizers_cut_the_text(metadata, pre, text, pieces):
    source = tokenizer_source({**metadata(), "tokenizer.ggml.pre": pre}, PATH)
    pre_tokenizer = build_encoder(source).pre_tokenizer
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_qwen2_composes_characters(metadata):
    source = tokenizer_source({**metadata(), "tokenizer.ggml.pre": "qwen2"}, PATH)
    assert encode(source, "e\u0301") == ["Ã", "©"]


def test_llama3_adds_bos_unless_told_otherwise(metadata):
    llama3 = {**metadata(), "tokenizer.ggml.pre": "llama-bpe"}
    assert tokenizer_source(llama3, PATH).add_bos
    assert not tokenizer_source({**llama3, "tokenizer.ggml.add_bos_token": False}, PATH).add_bos


@pytest.fixture
def pieces():
    """A SentencePiece vocabulary: scores say that "lo" is made before "el", and "hel" after it."""
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "h", "e", "l", "o", "lo", "el", "hel", "▁hel", "<b>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6, *[1] * 9, 4],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0, 0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_sentencepiece_merges_the_best_score_first(pieces):
    source = tokenizer_source(pieces, PATH)
    assert source.add_bos
    assert encode(source, "hello") == ["▁hel", "lo"]
    assert encode(source, "helo") == ["▁", "h", "e", "lo"]
    assert encode(source, "é<b>") == ["▁", "<0xC3>", "<0xA9>", "<b>"]


def test_sentencepiece_without_the_blank_in_front(pieces):
    source = tokenizer_source({**pieces, "tokenizer.ggml.add_space_prefix": False}, PATH)
    assert encode(source, "hel hel") == ["hel", "▁hel"]
    assert [step["type"] for step in json.loads(source.json)["decoder"]["decoders"]] == [
        "Replace",
        "ByteFallback",
        "Fuse",
    ]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokenizer.ggml.pre", "never-seen", "'never-seen'"),
        ("tokenizer.ggml.model", "bert", "'bert'"),
        ("tokenizer.ggml.tokens", ["a", "a"], "token_type"),
        ("tokenizer.ggml.tokens", [], "no tokenizer.ggml.tokens"),
        ("tokenizer.ggml.token_type", ["x"], "token_type"),
        ("tokenizer.ggml.eos_token_id", 999, "there are 260 tokens"),
        ("tokenizer.ggml.add_eos_token", True, "add_eos_token"),
        ("tokenizer.chat_template", 5, "not a string"),
    ],
)
def test_what_cannot_be_rebuilt_is_named(metadata, key, value, said):
    with pytest.raises(CheckpointError, match=said):
        tokenizer_source({**metadata(), key: value}, PATH)


def test_the_same_token_twice(metadata):
    keys = metadata()
    keys["tokenizer.ggml.tokens"][5] = keys["tokenizer.ggml.tokens"][6]
    with pytest.raises(CheckpointError, match="same token twice"):
        build_encoder(tokenizer_source(keys, PATH))


def test_a_merge_that_is_not_two_tokens_is_named_when_it_is_needed(metadata):
    source = tokenizer_source({**metadata(), "tokenizer.ggml.merges": ["h e l"]}, PATH)
    with pytest.raises(CheckpointError, match="not two tokens"):
        build_encoder(source)
    with pytest.raises(CheckpointError, match="no tokenizer.ggml.merges"):
        tokenizer_source({**metadata(), "tokenizer.ggml.merges": []}, PATH)
