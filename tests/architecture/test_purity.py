"""What import rules cannot see: business logic that calls out without importing, and state that modules share."""

import ast
from pathlib import Path

import pytest

PURE = ("vocab", "contracts", "scheduler", "ops", "text", "model", "settings")
CALLS = {"open", "print", "input", "exec", "eval", "__import__", "globals", "breakpoint"}
METHODS = {"read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink"}


def outward_calls(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) if name in CALLS:
                    found.append((node.lineno, name))
                case ast.Attribute(attr=name) if name in METHODS:
                    found.append((node.lineno, name))
    return found


@pytest.mark.parametrize("package", PURE)
def test_business_logic_calls_nothing_outside(packages, package):
    folder: Path = packages["atlas_core"] / package
    paths = sorted(folder.rglob("*.py"))
    assert paths, f"there is no package {package}"
    faults = [
        f"{path}:{line} calls {name}" for path in paths for line, name in outward_calls(ast.parse(path.read_text()))
    ]
    assert not faults


def test_the_walk_sees_each_call():
    source = "\n".join([*(f"{name}('x')" for name in CALLS), *(f"p.{name}()" for name in METHODS)])
    assert len(outward_calls(ast.parse(source))) == len(CALLS) + len(METHODS)


def test_no_module_rebinds_its_globals(modules):
    faults = [
        f"{path}:{node.lineno}"
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert not faults


def test_no_torch(files):
    """Ruff and import-linter watch the packages; this watches scripts, tests and benches as well, but for what torch is compared in."""
    faults = []
    for path in files:
        if path.suffix != ".py" or path.match("bench/gpu/torch_*.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            faults += [f"{path}:{node.lineno}" for name in names if name.partition(".")[0] == "torch"]
    assert not faults
