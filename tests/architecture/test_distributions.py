"""Distributions: one version, dependencies that are pinned, plugin modules that cost nothing to import."""

import importlib
import re
import tomllib

import pytest

import atlas_core
from atlas_core.plugins import GROUPS
from atlas_core.plugins.footprint import footprint


def project(folder) -> dict:
    return tomllib.loads((folder.parent.parent / "pyproject.toml").read_text())["project"]


def pins(root) -> list[str]:
    lines = (root / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_pins_are_names_and_versions_only(root):
    assert [line for line in pins(root) if re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) is None] == []


def test_every_dependency_is_pinned(root, packages):
    pinned = {normal(line.partition("==")[0]) for line in pins(root)}
    groups = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]
    wanted = set(groups["dev"])
    for folder in packages.values():
        found = project(folder)
        wanted |= {
            *found["dependencies"],
            *(name for extra in found.get("optional-dependencies", {}).values() for name in extra),
        }
    names = {normal(re.match(r"[A-Za-z0-9._-]+", text)[0]) for text in wanted}
    own = {normal(name) for name in packages}
    assert names - own - pinned == set()


def test_every_distribution_is_the_same_release_under_one_licence(packages):
    for name, folder in packages.items():
        found = project(folder)
        assert normal(found["name"]) == normal(name)
        assert found["license"] == "Apache-2.0"
        assert importlib.import_module(name).__version__ == atlas_core.__version__
        assert (folder / "py.typed").exists()


def test_importing_a_plugin_module_imports_nothing_heavy(packages):
    points = {
        value.partition(":")[0]
        for folder in packages.values()
        for group, table in project(folder).get("entry-points", {}).items()
        if group in GROUPS
        for value in table.values()
    }
    assert "atlas_core.builtins" in points
    assert {module: footprint(module) for module in points} == dict.fromkeys(points, ())


def test_the_footprint_sees_what_is_heavy(tmp_path, monkeypatch):
    (tmp_path / "toy_heavy.py").write_text(
        "import json\nimport numpy\nimport atlas_core.vocab.dtype\nimport atlas_core.settings\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = footprint("toy_heavy")
    assert "numpy" in found
    assert "atlas_core.settings" in found
    assert not {"json", "atlas_core.vocab", "atlas_core.vocab.dtype", "toy_heavy"} & set(found)
    with pytest.raises(ImportError, match="toy_nowhere"):
        footprint("toy_nowhere")
