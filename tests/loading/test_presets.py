"""MODEL.toml: what it may say, which checkpoints it is for, and those that come with Atlas."""

import pytest

from atlas_core.loading.presets import SAMPLING, choose_preset, parse_preset, read_presets
from atlas_core.vocab.errors import PluginError, ResolveError
from atlas_core.vocab.preset import ModelPreset

FULL = """
[match]
model_types = ["toy", "toy_moe"]
hidden_size = 64
names = ["Toy-1B"]

[sampling]
temperature = 0.6
top_k = 20

[dialect]
tool_calls = "hermes"
reasoning = "think"
"""


def preset(name="a", types=("toy",), size=0, names=()):
    return ModelPreset(name, "", types, size, names)


def chosen(presets, model_type="toy", size=64, path="models/toy-1b"):
    return choose_preset(presets, model_type, size, path)


def test_everything_that_a_file_may_say():
    assert parse_preset("toy-1b", FULL, "here") == ModelPreset(
        "toy-1b", "here", ("toy", "toy_moe"), 64, ("toy-1b",), (("temperature", 0.6), ("top_k", 20)), "hermes", "think"
    )


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("top_k = 20", "top_kk = 20", "sampling.top_kk"),
        ("temperature = 0.6", "temperature = -1", "sampling.temperature is -1"),
        ("temperature = 0.6", "temperature = true", "sampling.temperature is True"),
        ("hidden_size = 64", 'hidden_size = "64"', "match.hidden_size"),
        ("hidden_size = 64", "hidden = 64", "match.hidden"),
        ('names = ["Toy-1B"]', 'names = "Toy-1B"', "match.names"),
        ('model_types = ["toy", "toy_moe"]', "", "match.model_types"),
        ('reasoning = "think"', "reasoning = 3", "dialect.reasoning"),
        ("[dialect]", "[dialects]", "dialects"),
        ("[match]", "[match", "no TOML"),
        ("[match]", "sampling = 1\n[match]", "no TOML"),
    ],
)
def test_faults_name_the_file_and_the_key(old, new, word):
    with pytest.raises(PluginError) as caught:
        parse_preset("toy", FULL.replace(old, new), "models/toy/MODEL.toml")
    assert word in caught.value.what
    assert "models/toy/MODEL.toml" in caught.value.what


def test_type_size_and_name_decide_and_everybody_else_says_why_not():
    presets = [preset("b", names=("toy-1b",)), preset("c", size=32), preset("d", types=("other",))]
    found = chosen(presets)
    assert found.name == "b"
    assert [(c.name, c.verdict.reasons) for c in found.rejected] == [
        ("c", ("it is for a hidden size of 32, not 64",)), ("d", ("it is for other, not toy",)),
    ]  # fmt: skip
    assert chosen(presets, path="models/another").winner is None


def test_a_size_counts_more_than_a_name_and_a_long_name_more_than_a_short_one():
    assert chosen([preset("any", names=("toy-1b",)), preset("sized", size=64)]).name == "sized"
    assert chosen([preset("short", names=("toy",)), preset("long", names=("toy-1b",))]).name == "long"
    with pytest.raises(ResolveError, match="both answer"):
        chosen([preset("one"), preset("two")])


@pytest.mark.parametrize(
    ("path", "fits"),
    [
        ("Owner/Toy-1B", True),
        ("hub/models--Owner--Toy-1B/snapshots/0123abcd", True),
        ("C:\\models\\Toy-1B\\", True),
        ("/data/Toy-1B/tries/of/others", False),
    ],
)
def test_a_name_is_looked_for_in_the_last_parts_of_a_path(path, fits):
    assert (chosen([preset(names=("toy-1b",))], path=path).winner is not None) == fits


def test_a_plugin_that_promises_presets_and_has_none_is_told():
    with pytest.raises(PluginError, match="has no folder models"):
        read_presets("atlas_core.vocab")


def test_presets_of_the_qwen_family_are_for_types_that_it_reads():
    found = read_presets("atlas_model_qwen")
    assert len(found) >= 5
    for one in found:
        assert one.names, one.name
        assert {key for key, _ in one.sampling} <= set(SAMPLING)
    names = {
        ("qwen3_moe", "Qwen/Qwen3-30B-A3B"): "qwen3-30b-a3b",
        ("qwen3_moe", "Qwen/Qwen3-30B-A3B-Instruct-2507"): "qwen3-30b-a3b-instruct",
        ("qwen3_moe", "Qwen/Qwen3-Coder-30B-A3B-Instruct"): "qwen3-coder",
        ("qwen3_5_moe", "Qwen/Qwen3.6-35B-A3B-FP8"): "qwen3.5-35b-a3b",
        ("qwen3_5_moe", "me/my-own-model"): "",
    }
    for (model_type, path), name in names.items():
        assert choose_preset(found, model_type, 2048, path).name == name
