"""The pages for authors of models and of formats: their excerpts, scripts, messages and words are what there is."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from atlas_core.contracts.quant import QuantFormat
from atlas_core.model.builder import ForwardBuilder

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "writing-a-model-plugin.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "atlas_model_minimax"
TINY = ROOT / "tests" / "data" / "tiny" / "minimax_m2"
FORMATS = (ROOT / "docs" / "writing-a-quant-format.md").read_text(encoding="utf-8")


def named(page: str) -> list[tuple[str, str]]:
    """Blocks of code under a name; files may be shown in several pieces."""
    return re.findall(r"^<!-- (\w+: .+?) -->\n```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


BLOCKS = dict(named(PAGE))
FAULTS = {
    "unread": {"mystery_scale": 2},
    "unknown": {"scoring_func": "softmax"},
    "nobody": {"model_type": "sphinx"},
    "missing": {"num_hidden_layers": 3},
    "unused": {"num_hidden_layers": 1},
    "shape": {"hidden_size": 96},
}
"""By the name of the page's block: what config.json says instead."""
NO_WORDS = {"activation", "finish"}
"""Methods of the builder that only ops of one's own, and core, need."""


@pytest.fixture(scope="module")
def family(installed, tmp_path_factory):
    """The distribution, installed outside the checkout."""
    return installed(EXAMPLE, tmp_path_factory.mktemp("family") / "site")


@pytest.mark.parametrize(("page", "least"), [(PAGE, 5), (FORMATS, 5)], ids=["model", "format"])
def test_excerpts_are_what_the_files_say(page, least):
    shown = [(name.removeprefix("file: "), text) for name, text in named(page) if name.startswith("file: ")]
    assert len(shown) >= least
    for name, text in shown:
        content = (ROOT / name).read_text(encoding="utf-8")
        # Lines within a function stand further left on the page, and may be broken elsewhere.
        assert "".join(text.split()) in "".join(content.split()), f"{name} does not read\n{text}"


def test_the_page_has_every_word():
    words = {name for name, value in vars(ForwardBuilder).items() if callable(value) and not name.startswith("_")}
    table = PAGE.partition("| words | record |")[2].partition("\n\n")[0]
    assert (
        set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line)))
        == words - NO_WORDS
    )


def test_the_example_needs_no_more_than_the_page_says():
    allowed = (
        "atlas_core.vocab",
        "atlas_core.contracts",
        "atlas_core.hookspecs",
        "atlas_core.model",
        "atlas_model_minimax",
    )
    modules = list(EXAMPLE.glob("src/**/*.py"))
    assert {path.stem for path in modules} >= {"plugin", "config", "weights", "loader"}
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("atlas"):
                assert f"{node.module}.".startswith(tuple(f"{name}." for name in allowed)), f"{path}: {node.module}"


def test_the_proof_of_a_format_holds(formats):
    said = formats.run("-c", dict(named(FORMATS))["script: proof"])
    assert said.code == 0, said.text


def test_the_page_names_every_member_of_a_format():
    members = {name for name in (*vars(QuantFormat), *QuantFormat.__annotations__) if not name.startswith("_")} - {
        "name"
    }
    assert [name for name in members if not re.search(rf"^\| `{name}\b", FORMATS, re.MULTILINE)] == []


def test_the_proof_holds(family):
    said = family.run("-c", BLOCKS["script: proof"])
    assert said.code == 0, said.text


@pytest.mark.parametrize("name", FAULTS)
def test_the_page_shows_what_is_said(family, pattern, tmp_path, name):
    folder = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | FAULTS[name]
    (folder / "config.json").write_text(json.dumps(config))
    said = family.type(f"$ atlas explain {folder} --hardware cpu")
    assert said.code != 0
    assert pattern(BLOCKS[f"fault: {name}"]).search(said.text), said.text


def test_every_message_is_followed():
    assert {name.removeprefix("fault: ") for name in BLOCKS if name.startswith("fault: ")} == set(FAULTS)
