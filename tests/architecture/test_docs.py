"""The map tells the truth: every package and every hook has its sentence, every export exists."""

import ast
import importlib
import inspect
import re

from atlas_core import hookspecs


def hooks() -> list[str]:
    return [name for name, value in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("atlas_")]


def test_every_package_has_its_sentence(root, packages):
    text = (root / "docs" / "architecture.md").read_text()
    core = packages["atlas_core"]
    layers = [path.stem for path in core.iterdir() if (path / "__init__.py").exists()] + ["hookspecs", "builtins"]
    missing = [name for name in [*layers, *packages] if re.search(rf"`{name}`[^.`]*\w{{2,}}[^.]*\.", text) is None]
    assert not missing


def test_every_hook_has_a_test_named_after_it(root):
    assert len(hooks()) == 6
    tree = ast.parse((root / "tests" / "plugins" / "test_hooks.py").read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {f"test_{hook}" for hook in hooks()} <= tests


def test_every_hook_is_documented(root):
    text = "\n".join(path.read_text() for path in (root / "docs").glob("*.md"))
    assert [hook for hook in hooks() if f"`{hook}`" not in text] == []


def test_exports_are_sorted_and_real(packages, modules):
    checked = 0
    for path in modules:
        if "__all__" not in path.read_text():
            continue
        package = next(folder for folder in packages.values() if path.is_relative_to(folder))
        dotted = path.relative_to(package.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        module = importlib.import_module(dotted)
        assert list(module.__all__) == sorted(module.__all__, key=lambda name: (not name.isupper(), name)), dotted
        assert [name for name in module.__all__ if not hasattr(module, name)] == [], dotted
        checked += 1
    assert checked > 0
