"""Identity is of the bytes that are installed: the same from wheel and checkout, another after any edit."""

import shutil

import pytest

from atlas_core.plugins import discover, installed
from atlas_core.plugins.identity import difference, identity


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "toy_identity"
    for name, text in {"__init__.py": "", "kernels/toy/HARDWARE.toml": "a = 1\n", "plugin.py": "1 / 0\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def digest():
    ((_, told),) = identity([("toy", "1.0", "toy_identity.plugin")])
    version, _, digits = told.partition(" ")
    assert version == "1.0"
    assert len(digits) == 12
    return digits


def test_every_byte_and_name_counts_and_nothing_is_imported(package):
    seen = [digest()]
    assert digest() == seen[0]
    (package / "plugin.py").write_text("1 / 1\n")
    seen.append(digest())
    (package / "kernels/toy/HARDWARE.toml").write_text("a = 2\n")
    seen.append(digest())
    (package / "plugin.py").rename(package / "plugins.py")
    seen.append(digest())
    assert len(set(seen)) == 4


def test_what_is_made_from_the_files_does_not_count(package):
    before = digest()
    for name in ("__pycache__/plugin.pyc", "_compiled/toy/native/common/a.so"):
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text("x")
    assert digest() == before


def test_two_copies_are_the_same(package, tmp_path, monkeypatch):
    before = digest()
    shutil.move(package, tmp_path / "elsewhere" / package.name)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert digest() == before


def test_a_module_without_a_package_and_one_that_is_gone(install):
    install("toy-single", "plugin = 1\n", version="2.0")
    here = dict(installed())["toy-single"]
    assert here.startswith("2.0 ")
    assert identity([("toy-single", "2.0", "toy_single_gone")])[0][1] != here


def test_broken_plugins_are_installed_and_not_part_of_the_registry(install):
    install("toy-broken", "1 / 0\n")
    assert "toy-broken" in dict(installed())
    registry = dict(discover().identity())
    assert "toy-broken" not in registry
    assert registry.items() <= dict(installed()).items()


def test_differences_in_words():
    ours = (("a", "1 aa"), ("b", "1 bb"), ("c", "1 cc"))
    assert difference(ours, ours) == ""
    told = difference(ours, (("a", "1 aa"), ("b", "1 ff"), ("d", "2 dd")))
    assert told == (
        "b is 1 bb here and 1 ff there; c is 1 cc here and not installed there; d is not installed here and 2 dd there"
    )
