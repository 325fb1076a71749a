import json
import shutil
import struct
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from atlas_core.contracts.checkpoint import CheckpointReader
from atlas_core.loading.huggingface import LAYOUTS, HuggingFaceReader
from atlas_core.loading.safetensors import BITS
from atlas_core.vocab.errors import CheckpointError

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
READER: CheckpointReader = HuggingFaceReader()


def save(path, tensors):
    """A safetensors file of float32 arrays."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = np.asarray(values, np.float32).tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(np.shape(values)),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def index(folder, placed):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    return tmp_path


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield lambda path: stack.enter_context(closing(READER.open(path)))


def test_a_real_directory(opened):
    assert READER.detect(TINY).ok
    checkpoint = opened(TINY)
    assert (checkpoint.naming, checkpoint.config["model_type"]) == ("hf", "llama")
    assert checkpoint.generation_config["eos_token_id"] == 498
    assert checkpoint.quantization == {}
    raw = (TINY / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    assert checkpoint.tensors.keys() == header.keys()
    for name, stored in header.items():
        start, end = (8 + length + offset for offset in stored["data_offsets"])
        info = checkpoint.tensors[name]
        assert (info.shape, info.layout, info.nbytes) == (tuple(stored["shape"]), "f32", end - start)
        assert checkpoint.read(name) == raw[start:end]
    source = checkpoint.tokenizer()
    assert source.json == (TINY / "tokenizer.json").read_text(encoding="utf-8")
    assert source.special == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert source.chat_templates["default"].startswith("{%- if tools %}")
    checkpoint.close()
    checkpoint.close()


def test_row_ranges(folder, opened):
    values = np.arange(12.0).reshape(4, 3)
    save(folder / "model.safetensors", {"a": values, "b": np.arange(4.0)})
    checkpoint = opened(folder)
    got = np.frombuffer(checkpoint.read("a", [(3, 4), (0, 2), (2, 2)]), np.float32)
    assert got.tolist() == [9, 10, 11, 0, 1, 2, 3, 4, 5]
    assert np.frombuffer(checkpoint.read("b", [(1, 3)]), np.float32).tolist() == [1, 2]
    with pytest.raises(CheckpointError, match="has 4 rows"):
        checkpoint.read("a", [(2, 5)])
    with pytest.raises(CheckpointError, match="no tensor"):
        checkpoint.read("c")


def test_shards(folder, opened):
    save(folder / "one.safetensors", {"a": [1.0]})
    save(folder / "two.safetensors", {"b": [2.0]})
    index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    checkpoint = opened(folder)
    assert [struct.unpack("<f", checkpoint.read(name))[0] for name in "ab"] == [1.0, 2.0]


def test_one_file_of_another_name(folder, opened):
    save(folder / "weights.safetensors", {"a": [1.0]})
    assert list(opened(folder).tensors) == ["a"]
    save(folder / "more.safetensors", {"b": [1.0]})
    with pytest.raises(CheckpointError, match="contradict") as caught:
        READER.open(folder)
    assert "2 other safetensors files" in caught.value.why


@pytest.mark.parametrize(
    ("one", "two", "placed", "said"),
    [
        ("a", "b", {"a": "one.safetensors", "b": "gone.safetensors"}, "gone.safetensors does not exist"),
        (
            "a",
            "b",
            {"a": "one.safetensors", "c": "two.safetensors"},
            "places c in two.safetensors, which does not have it",
        ),
        ("a", "b", {"a": "two.safetensors", "b": "one.safetensors"}, "places a in two.safetensors, it is in one"),
        ("a", "a", {"a": "one.safetensors", "b": "two.safetensors"}, "a is in one.safetensors and in two.safetensors"),
        ("a", "b", {"a": "../one.safetensors"}, "not a safetensors file of this directory"),
        ("a", "b", {}, "no weight_map"),
    ],
)
def test_an_index_that_contradicts_the_files(folder, one, two, placed, said):
    save(folder / "one.safetensors", {one: [1.0]})
    save(folder / "two.safetensors", {two: [2.0]})
    index(folder, placed)
    with pytest.raises(CheckpointError) as caught:
        READER.open(folder)
    assert said in str(caught.value)


def test_two_sets_of_weights(folder):
    save(folder / "model.safetensors", {"a": [1.0]})
    save(folder / "one.safetensors", {"a": [1.0]})
    index(folder, {"a": "one.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        READER.open(folder)
    assert "two sets of weights" in caught.value.why


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "{}", "no model_type"),
        (
            "config.json",
            "version https://git-lfs.github.com/spec/v1\nsize 12\n",
            "git-lfs pointer for a file of 12 bytes",
        ),
        ("generation_config.json", "x", "generation_config.json is not valid JSON"),
        ("model.safetensors", "<html>", "looks like a web page"),
    ],
)
def test_files_that_are_not_what_they_should_be(folder, name, text, said):
    save(folder / "model.safetensors", {"a": [1.0]})
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        READER.open(folder)
    assert said in str(caught.value)


def test_detection_says_what_is_missing(tmp_path):
    assert READER.detect(tmp_path / "none").reasons == ("it is not a directory",)
    assert READER.detect(tmp_path).reasons == ("it has no config.json",)
    (tmp_path / "config.json").write_text("{}")
    assert READER.detect(tmp_path).reasons == ("it has no *.safetensors",)
    (tmp_path / "pytorch_model.bin").write_text("")
    assert READER.detect(tmp_path).reasons == ("it has no *.safetensors, only pytorch_model.bin, a pickle",)


@pytest.fixture
def with_tokenizer(folder, opened):
    save(folder / "model.safetensors", {"a": [1.0]})

    def source(**files):
        for name, content in files.items():
            path = folder / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return opened(folder).tokenizer()

    return source


def test_templates_and_special_tokens(with_tokenizer):
    source = with_tokenizer(
        tokenizer_json="{}",
        tokenizer_config_json={
            "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
            "bos_token": {"content": "<s>", "lstrip": False},
            "pad_token": None,
            "add_bos_token": True,
        },
        special_tokens_map_json={"bos_token": "<older>", "unk_token": "<unk>", "additional_special_tokens": ["x"]},
    )
    assert source.chat_templates == {"default": "d", "tool_use": "t"}
    assert source.special == {"bos_token": "<s>", "unk_token": "<unk>"}
    assert source.add_bos


def test_template_files_win(with_tokenizer):
    source = with_tokenizer(
        tokenizer_json="{}",
        tokenizer_config_json={"chat_template": "old"},
        chat_template_jinja="new",
        additional_chat_templates__rag_jinja="r",
    )
    assert source.chat_templates == {"default": "new", "rag": "r"}


def test_no_tokenizer_that_can_be_read(with_tokenizer, folder):
    (folder / "tokenizer.model").write_text("")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json") as caught:
        with_tokenizer()
    assert "tokenizer.model alone" in caught.value.why


def test_quantization_statements(folder, opened):
    save(folder / "model.safetensors", {"a": [1.0]})
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert opened(folder).quantization == {"quantization": {"quant_algo": "NVFP4"}}
    (folder / "config.json").write_text('{"model_type": "toy", "quantization_config": {"quant_method": "fp8"}}')
    assert opened(folder).quantization == {"quant_method": "fp8"}


def test_every_dtype_has_a_layout(folder, opened):
    for dtype, layout in LAYOUTS.items():
        assert layout.block_bytes * 8 == BITS[dtype] * layout.block
    shutil.copy(TINY / "model.safetensors", folder)
    checkpoint = opened(folder)
    assert checkpoint.layout("bf16").row_bytes(3) == 6
    with pytest.raises(CheckpointError, match="q4_1"):
        checkpoint.layout("q4_1")
