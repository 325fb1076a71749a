import contextlib
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atlas_core.vocab.errors import CheckpointError
from atlas_quant_gguf.config import llama3_divisors
from atlas_quant_gguf.reader import GgufReader


@pytest.fixture
def save(tmp_path):
    def write(data: bytes) -> Path:
        path = tmp_path / "toy.gguf"
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def opened():
    """Opens checkpoints and closes them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda path: stack.enter_context(contextlib.closing(GgufReader().open(path)))


@pytest.fixture
def reopened():
    """The same with what they remember."""
    with contextlib.ExitStack() as stack:
        yield lambda *known: stack.enter_context(contextlib.closing(GgufReader().reopen(*known)))


def test_opened_again_by_what_it_remembers_it_is_the_same(
    opened, reopened, build, metadata, tensors, save, monkeypatch
):
    path = save(build(metadata(), tensors()))
    first = opened(path)
    remembered = first.remembered()
    with monkeypatch.context() as patched:
        patched.setattr("atlas_quant_gguf.reader.read_header", None)
        again = reopened(path, remembered)
        assert (again.config, again.generation_config) == (first.config, first.generation_config)
        assert (again.tensors, again.quantization, again.naming) == (first.tensors, first.quantization, first.naming)
        assert again.path == first.path
        for name, (_, _, data) in tensors().items():
            assert bytes(again.read(name)) == data
            assert again.extent(name) == first.extent(name)
        assert again.remembered() == remembered
    one, other = again.tokenizer(), first.tokenizer()
    assert (one.json, one.chat_templates, one.special, one.add_bos) == (
        other.json,
        other.chat_templates,
        other.special,
        other.add_bos,
    )
    assert one.tables is None or (list(one.tables.tokens), one.tables.merges()) == (
        list(other.tables.tokens),
        other.tables.merges(),
    )
    with pytest.raises(CheckpointError, match="of another kind"):
        GgufReader().reopen(path, b"\x93\x01\x02\x03")


@pytest.mark.parametrize("version", [2, 3])
def test_reads_what_was_written(opened, build, metadata, tensors, save, version):
    path = save(build(metadata(), tensors(), version))
    assert GgufReader().detect(path).ok
    checkpoint = opened(path)
    assert checkpoint.naming == "gguf"
    assert {name: (info.shape, info.layout, info.nbytes) for name, info in checkpoint.tensors.items()} == {
        "token_embd.weight": ((260, 12), "f32", 12480),
        "blk.0.attn_q.weight": ((12, 32), "q4_1", 240),
        "output_norm.weight": ((12,), "f32", 48),
    }
    for name, (_, _, data) in tensors().items():
        assert bytes(checkpoint.read(name)) == data
        extent = checkpoint.extent(name)
        assert extent.path.read_bytes()[extent.start : extent.start + extent.nbytes] == data
    checkpoint.close()
    checkpoint.close()


def test_row_ranges_in_the_order_asked_for(opened, build, metadata, tensors, save):
    checkpoint = opened(save(build(metadata(), tensors())))
    whole = bytes(range(240))
    assert bytes(checkpoint.read("blk.0.attn_q.weight", [(11, 12), (0, 2)])) == whole[220:240] + whole[:40]
    assert np.frombuffer(checkpoint.read("output_norm.weight", [(3, 5), (1, 2)]), np.float32).tolist() == [3, 4, 1]
    with pytest.raises(CheckpointError, match="12 rows"):
        checkpoint.read("blk.0.attn_q.weight", [(0, 13)])
    with pytest.raises(CheckpointError, match="no tensor"):
        checkpoint.read("nothing")


def test_a_file_that_shrinks_while_it_is_used(opened, build, metadata, tensors, save):
    path = save(build(metadata(), tensors()))
    checkpoint = opened(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 40)
    with pytest.raises(CheckpointError, match="ended at byte"):
        checkpoint.read("output_norm.weight")


def test_config_in_hub_shape(opened, build, metadata, tensors, save):
    checkpoint = opened(save(build(metadata(), tensors())))
    assert checkpoint.config == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 12, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": None,
        "tie_word_embeddings": True, "vocab_size": 260, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    assert checkpoint.generation_config == {"bos_token_id": 0, "eos_token_id": 1}


def test_end_of_turn_is_a_second_end(opened, build, metadata, tensors, save):
    checkpoint = opened(save(build({**metadata(), "tokenizer.ggml.eot_token_id": 7}, tensors())))
    assert checkpoint.generation_config["eos_token_id"] == [1, 7]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.expert_count", 8, "llama.expert_count = 8 is not understood"),
        ("llama.attention.head_count", [2, 4], "the same for every layer"),
        ("llama.rope.dimension_count", 4, "the head size 6"),
        ("llama.rope.scaling.type", "never_seen", "none, linear or yarn"),
        ("llama.embedding_length", "wide", "a positive whole number"),
        ("llama.rope.freq_base", float("nan"), "a positive number"),
        ("tokenizer.ggml.eos_token_id", "two", "a token id"),
        ("general.architecture", "wide", "cannot be read from GGUF"),
        ("general.architecture", [1], "cannot be read from GGUF"),
        ("general.type", "adapter", "no model"),
        ("split.count", 2, "one of 2 parts"),
        ("general.alignment", 12, "multiple of 8"),
    ],
)
def test_keys_that_are_not_understood(build, metadata, tensors, save, key, value, said):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        GgufReader().open(save(build({**metadata(), "general.alignment": 32, key: value}, tensors())))


def test_a_count_of_nothing_is_no_unknown_key(build, metadata, tensors, save):
    GgufReader().open(save(build({**metadata(), "llama.expert_count": 0}, tensors()))).close()


def test_missing_key_is_named(build, metadata, tensors, save):
    keys = metadata()
    del keys["llama.block_count"]
    with pytest.raises(CheckpointError, match=r"lacks the key llama\.block_count"):
        GgufReader().open(save(build(keys, tensors())))


def test_llama3_scaling_is_recovered_from_its_divisors(opened, build, metadata, tensors, save):
    keys = {**metadata(), "llama.rope.freq_base": 500000.0, "llama.attention.key_length": 64}
    keys["llama.attention.value_length"] = 64
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    divisors = llama3_divisors(scaling, 500000.0, 64).astype(np.float32)
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0
    parts = {**tensors(), "rope_freqs.weight": ((32,), 0, divisors.tobytes())}
    checkpoint = opened(save(build(keys, parts)))
    assert checkpoint.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in checkpoint.tensors
    parts["rope_freqs.weight"] = ((32,), 0, (divisors * 1.01).tobytes())
    with pytest.raises(CheckpointError, match="another scaling"):
        GgufReader().open(save(build(keys, parts)))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not with"),
        (b"GGU", "not with"),
        (b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors, more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 15), "keys, more than"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(64), "bytes in a key"),
    ],
)
def test_not_a_gguf_file(save, data, said):
    with pytest.raises(CheckpointError, match=said):
        GgufReader().open(save(data))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": ((2, 31), 3, bytes(40))}, "not a multiple of the 32-weight block"),
        ({"a": ((2, 32), 99, bytes(40))}, "unknown tensor type 99"),
        ({"a": ((0, 32), 0, b"")}, "impossible shape"),
        ({"a": ((1 << 50, 32), 0, b"")}, "impossible shape"),
        ({"a": ((1 << 30, 1 << 30), 0, b"")}, "the file is cut"),
        ({"a": ((1, 1, 1, 1, 8), 0, bytes(32))}, "5 dimensions"),
        ({"a": ((64,), 0, bytes(64)), "b": ((8,), 0, bytes(32))}, "inside 'a'"),
    ],
)
def test_tensors_that_cannot_be(build, metadata, save, change, said):
    with pytest.raises(CheckpointError, match=said):
        GgufReader().open(save(build(metadata(), change)))


def test_a_directory_with_one_file(opened, build, metadata, tensors, tmp_path):
    (tmp_path / "a.gguf").write_bytes(build(metadata(), tensors()))
    assert GgufReader().detect(tmp_path).ok
    assert opened(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    assert GgufReader().detect(tmp_path).reasons == ("it is a directory with 2 *.gguf files",)
    assert not GgufReader().detect(tmp_path / "none.gguf").ok


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400)
@given(st.data())
@example(None)
def test_damage_is_a_checkpoint_error_or_harmless(build, metadata, tensors, save, data):
    """No flipped byte, no cut and no changed length may give another exception, or make the reader ask for much memory."""
    whole = bytearray(build(metadata(), tensors()))
    if data is not None:
        header = whole.index(bytes(range(200)))
        for _ in range(data.draw(st.integers(1, 3))):
            whole[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
        del whole[data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole)))) :]
    path = save(bytes(whole))
    tracemalloc.start()
    try:
        with contextlib.closing(GgufReader().open(path)) as checkpoint:
            checkpoint.tokenizer()
            for name, info in checkpoint.tensors.items():
                assert len(checkpoint.read(name)) == info.nbytes
    except CheckpointError as error:
        assert str(path) in error.what
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


@given(
    st.lists(st.one_of(st.text(max_size=12), st.sampled_from(["", "\0", "a\0\0\0\0\0\0\0", "é" * 200, "x" * 255, "x" * 256])), max_size=60),
    st.sampled_from([1, 2, 40]),
)  # fmt: skip
@settings(deadline=None, max_examples=120)
def test_any_texts_come_back_from_an_array_of_strings(texts, copies):
    import io

    from atlas_quant_gguf.metadata import _Cursor

    data = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts * copies)
    cursor = _Cursor(io.BytesIO(data + b"\1\0\0\0\0\0\0\0rest"), len(data) + 12, Path("x"))
    found = cursor.strings(len(texts) * copies, "texts")
    assert list(found) == texts * copies
    assert [found[index] for index in range(len(found))] == texts * copies
    assert cursor.position == len(data)
    assert cursor.take(2) == b"\1\0"


def test_a_text_of_a_vocabulary_that_is_not_utf8_is_named_by_its_place(build, metadata, tensors, save):
    keys = metadata()
    keys["tokenizer.ggml.tokens"] = [f"token {number}" for number in range(3000)]
    whole = bytearray(build(keys, tensors()))
    at = whole.index(b"token 2345")
    whole[at] = 0xFF
    path = save(bytes(whole))
    with (
        contextlib.closing(GgufReader().open(path)) as checkpoint,
        pytest.raises(CheckpointError, match=rf"at byte {at} of .*tokens is not UTF-8") as caught,
    ):
        checkpoint.tokenizer()
    assert str(path) in caught.value.what
