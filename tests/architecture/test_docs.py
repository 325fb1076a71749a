"""The map tells the truth: every package and every hook has its sentence, every export exists."""

import ast
import importlib
import inspect
import re
import typing

import msgspec

from atlas_core import hookspecs
from atlas_core.contracts import declarations
from atlas_core.contracts.backend import Capabilities
from atlas_core.plugins import GROUPS


def hooks() -> list[str]:
    return [name for name, value in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("atlas_")]


def test_every_package_has_its_sentence(root, packages):
    text = (root / "docs" / "architecture.md").read_text()
    core = packages["atlas_core"]
    layers = [path.stem for path in core.iterdir() if (path / "__init__.py").exists()] + ["hookspecs", "builtins"]
    names = [*layers, *(set(packages) - {"atlas_core"})]
    assert [name for name in names if re.search(rf"^\| `{name}` \| .*\w\. \|$", text, re.MULTILINE) is None] == []


def test_every_hook_has_a_test_named_after_it(root):
    assert len(hooks()) == 6
    tree = ast.parse((root / "tests" / "plugins" / "test_hooks.py").read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {f"test_{hook}" for hook in hooks()} <= tests


def test_the_page_of_hooks_has_each_with_its_group_and_declaration(root):
    text = (root / "docs" / "hooks.md").read_text()
    rows = {
        (hook, group, kind.__name__): f"| `{hook}` | `{group}` | `{kind.__name__}` |"
        for group, table in GROUPS.items()
        for hook, kind in table.items()
    }
    assert {hook for hook, _, _ in rows} == set(hooks())
    assert [row for row in rows.values() if row not in text] == []


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


def test_what_plugins_declare_is_read_by_somebody(packages):
    """A field that nobody reads would be a promise that nobody keeps."""
    core = packages["atlas_core"]
    text = "\n".join(path.read_text() for path in core.rglob("*.py") if "contracts" not in path.parts)
    kinds = [
        *typing.get_args(declarations.Declaration),
        declarations.CatalogueEntry,
        declarations.KernelRoot,
        Capabilities,
    ]
    unread = [
        f"{kind.__name__}.{field.name}"
        for kind in kinds
        for field in msgspec.structs.fields(kind)
        if kind is not declarations.CommBackendDecl and not re.search(rf"\.{field.name}\b|\"{field.name}\"", text)
    ]
    assert unread == []
