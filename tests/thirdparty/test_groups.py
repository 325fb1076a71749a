"""Models, storage formats and dialects of strangers: what is wrong with one is said in the same words, and harms nobody else."""

import json
import re
import shutil

import pytest

TINY = "tests/data/tiny/llama"
HEAD = "from atlas_core.contracts.declarations import *\nfrom atlas_core.hookspecs import hookimpl\n"
PLUGIN = HEAD + "class Toy:\n    @hookimpl\n    def {hook}(self):\n        return {declaration}\ntoy = Toy()\n"
GROUPS = {
    "atlas.models": ("atlas_model_weight_loader", "ModelDecl({key!r}, 'toy_loader:Loader'{more})", "model family"),
    "atlas.quant_formats": ("atlas_quant_format", "QuantFormatDecl({key!r}{more})", "quantisation format"),
    "atlas.dialects": ("atlas_dialect", "DialectDecl({key!r}, 'toy_dialect:Dialect'{more})", "dialect"),
}


def source(group, key="toy", more=""):
    hook, declaration, _ = GROUPS[group]
    return PLUGIN.format(hook=hook, declaration=declaration.format(key=key, more=more))


def broken(site, group):
    """The reason for which the plugin is broken; everybody else is sound."""
    said = site.type("$ atlas plugins list --json")
    assert said.code == 0, said.text
    records = {(record["group"], record["key"]): record for record in json.loads(said.text)}
    assert [key for key, record in records.items() if record["status"] != "ok"] == [(group, "toy")]
    return records[group, "toy"]["reason"]


@pytest.mark.parametrize("group", GROUPS)
def test_a_sound_one_is_listed(put, group):
    said = put("toy-a", group, source(group)).type("$ atlas plugins list --json")
    assert said.code == 0, said.text
    (record,) = [record for record in json.loads(said.text) if record["dist"] == "toy-a"]
    assert (record["status"], record["declares"][0]["key"]) == ("ok", "toy")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda text: text.replace("class Toy", "import toy_driver\nclass Toy"), "No module named 'toy_driver'"),
        (lambda text: text.replace("(self)", "s(self)"), "PluginValidationError: unknown hook 'atlas_"),
        (
            lambda text: text.replace(")\ntoy =", ", api='2.0')\ntoy ="),
            "it is written for api 2.0, this atlas-core speaks",
        ),
        (lambda text: text.replace(")\ntoy =", ", api='1.99')\ntoy ="), "upgrade atlas-core"),
        (lambda text: text.replace("'toy'", "'toys'"), "declares 'toys', but its entry point is named 'toy'"),
        (lambda text: text.replace("toy = Toy()", "toys = Toy()"), "has no attribute 'toy'"),
    ],
    ids=["import", "hook", "api", "newer", "key", "object"],
)
def test_a_broken_one_harms_nobody(put, group, spoil, reason):
    text = spoil(source(group))
    assert text != source(group)
    site = put("toy-a", group, text)
    assert reason in broken(site, group)
    if "toy_driver" in reason:
        explained = site.type(f"$ atlas explain {TINY} --hardware cpu")
        assert explained.code == 0, explained.text


@pytest.mark.parametrize("group", GROUPS)
def test_two_owners_of_one_key(put, group):
    put("toy-a", group, source(group))
    site = put("toy-b", group, source(group), version="2.0")
    for command in ("$ atlas plugins list", f"$ atlas explain {TINY} --hardware cpu"):
        said = site.type(command)
        assert said.code == 3, said.text
        assert f"error: two plugins offer the {GROUPS[group][2]} 'toy': toy-a and toy-b" in said.text
        assert "toy-a 1.0 (toy_a:toy) and toy-b 2.0 (toy_b:toy) both claim it" in said.text
        assert "cure: uninstall one of them, or name the plugins to load in ATLAS_PLUGINS" in said.text
    allowed = site.type(f"$ ATLAS_PLUGINS=toy-a,cpu,llama atlas explain {TINY} --hardware cpu")
    assert allowed.code == 0, allowed.text


def checkpoint(folder, model_type):
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    return folder


def test_a_broken_family_that_is_asked_for(put, tmp_path):
    site = put("toy-a", "atlas.models", "import toy_driver\n" + source("atlas.models"))
    said = site.type(f"$ atlas explain {checkpoint(tmp_path / 'model', 'toy')} --hardware cpu")
    assert said.code == 3, said.text
    assert "error: the model family 'toy' was asked for, and its plugin is broken" in said.text
    assert "toy-a 1.0, entry point toy_a:toy: ModuleNotFoundError: No module named 'toy_driver'" in said.text
    assert "cure: repair or reinstall toy-a" in said.text


def test_a_family_whose_loader_does_not_load(put, tmp_path):
    site = put("toy-a", "atlas.models", source("atlas.models"))
    said = site.type(f"$ atlas explain {checkpoint(tmp_path / 'model', 'toy')} --hardware cpu")
    assert said.code == 3, said.text
    assert "error: toy-a cannot load toy_loader:Loader" in said.text


def test_a_family_whose_kernels_are_lost(put, tmp_path):
    """The warning is everybody's, the error is for who serves the family."""
    loader = "from atlas_model_llama.loader import LlamaLoader as Loader\n"
    (tmp_path / "toy_loader.py").write_text(loader)
    (tmp_path / "toy_kernels").mkdir()
    (tmp_path / "toy_kernels" / "__init__.py").touch()
    site = put("toy-a", "atlas.models", source("atlas.models", more=", kernel_roots=(KernelRoot('toy_kernels'),)"))
    listed = site.type("$ atlas plugins list")
    assert listed.code == 0, listed.text
    assert re.search(
        r"^warning: toy_kernels:: the kernel root .*/toy_kernels/kernels does not exist", listed.text, re.MULTILINE
    )
    for command in (f"$ atlas explain {TINY} --hardware cpu", "$ atlas kernels list"):
        said = site.type(command)
        assert said.code == 0, said.text
    said = site.type(f"$ atlas explain {checkpoint(tmp_path / 'model', 'toy')} --hardware cpu")
    assert said.code == 6, said.text
    assert "error: Kernels of a plugin cannot be read" in said.text
    assert "toy_kernels/kernels does not exist" in said.text


def test_a_machine_whose_kernels_are_lost(variant):
    shutil.rmtree(variant.package / "kernels")
    listed = variant.type("$ atlas plugins list")
    assert listed.code == 0, listed.text
    assert "warning: atlas_plugin_toy:: the kernel root" in listed.text
    said = variant.type(f"$ atlas explain {TINY}")
    assert said.code == 0, said.text
    assert "not toy: its HARDWARE.toml is missing or wrong: see atlas kernels lint" in said.text
    asked = variant.type(f"$ atlas explain {TINY} --hardware toy")
    assert asked.code == 6, asked.text
    assert "error: Kernels of a plugin cannot be read" in asked.text
    assert "atlas_plugin_toy/kernels does not exist" in asked.text


@pytest.mark.parametrize("part", ["weights", "container"])
def test_a_format_that_does_not_load_refuses(put, part):
    site = put("toy-a", "atlas.quant_formats", source("atlas.quant_formats", more=f", {part}='toy_gone:Thing'"))
    said = site.type(f"$ atlas explain {TINY} --hardware cpu")
    assert said.code == 0, said.text
    assert (
        "not toy: toy-a cannot load toy_gone:Thing: importing toy_gone failed: No module named 'toy_gone'" in said.text
    )


def test_a_broken_format_says_so_to_who_may_need_it(put, tmp_path):
    site = put("toy-a", "atlas.quant_formats", "import toy_driver\n" + source("atlas.quant_formats"))
    (tmp_path / "model.toy").write_bytes(b"\x93NUMPY and more")
    said = site.type(f"$ atlas explain {tmp_path / 'model.toy'} --hardware cpu")
    assert said.code == 4, said.text
    assert "toy: its plugin is broken: toy-a 1.0: ModuleNotFoundError: No module named 'toy_driver'" in said.text


def test_a_format_that_fails_to_look_refuses(put, tmp_path):
    (tmp_path / "toy_reader.py").write_text("class Reader:\n    def detect(self, path):\n        return 1 / 0\n")
    site = put("toy-a", "atlas.quant_formats", source("atlas.quant_formats", more=", container='toy_reader:Reader'"))
    said = site.type(f"$ atlas explain {TINY} --hardware cpu")
    assert said.code == 0, said.text
    assert "not toy: it failed to look: ZeroDivisionError: division by zero" in said.text


DIALECTS = """
import logging, sys
from atlas_core.assembly.served import dialects
from atlas_core.plugins import discover
logging.basicConfig(format="%(levelname)s %(message)s")
print(sorted(dialects(discover(), sys.argv[1:])))
"""


def test_a_dialect_that_does_not_load_is_left_out_unless_named(put):
    site = put("toy-a", "atlas.dialects", source("atlas.dialects"))
    said = site.run("-c", DIALECTS, "hermes")
    assert said.code == 0, said.text
    assert "WARNING the dialect toy is left out: toy-a cannot load toy_dialect:Dialect" in said.text
    assert "'hermes'" in said.text
    assert "'toy'" not in said.text.splitlines()[-1]
    named = site.run("-c", DIALECTS, "toy")
    assert named.code == 1
    assert "PluginError: toy-a cannot load toy_dialect:Dialect" in named.text


def test_a_broken_dialect_that_is_asked_for(put):
    site = put("toy-a", "atlas.dialects", "import toy_driver\n" + source("atlas.dialects"))
    said = site.type(f"$ atlas serve {TINY} --hardware cpu --port 0 --tool-call-parser toy")
    assert said.code == 3, said.text
    assert "error: the dialect 'toy' was asked for, and its plugin is broken" in said.text
    assert "cure: repair or reinstall toy-a" in said.text
