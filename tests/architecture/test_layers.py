"""Who may import whom: the contracts of pyproject.toml, run; and that they cover every distribution."""

import subprocess
import sys
import tomllib
from pathlib import Path


def test_the_import_contracts_hold(root):
    tool = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([tool, "--no-logo", "--no-cache"], cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_rules_cover_every_distribution(root, packages):
    tool = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    contracts = {contract["id"]: contract for contract in tool["importlinter"]["contracts"]}
    plugins = set(packages) - {"atlas_core"}
    assert set(tool["importlinter"]["root_packages"]) == set(packages)
    assert set(tool["mypy"]["packages"]) == set(packages)
    assert set(tool["ruff"]["lint"]["isort"]["known-first-party"]) == set(packages)
    assert set(contracts["no-torch"]["source_modules"]) == set(packages)
    assert set(contracts["core-knows-no-plugin"]["forbidden_modules"]) == plugins
    assert set(contracts["plugin-surface"]["source_modules"]) == plugins
    assert set(contracts["plugins-alone"]["modules"]) | set(contracts["vendor-alone"]["modules"]) == plugins


def test_the_rules_bite(root, tmp_path):
    """A copy of core in which a value reads the clock, and a lower layer imports a higher one, must fail both ways."""
    source = root / "atlas_core" / "src" / "atlas_core"
    copy = tmp_path / "atlas_core"
    for path in source.rglob("*.py"):
        target = copy / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    with (copy / "vocab" / "verdict.py").open("a") as file:
        file.write("\nimport time\nimport atlas_core.cli.main\n")
    rules = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    kept = [contract for contract in rules["contracts"] if contract["id"] in ("core-layers", "pure")]
    lines = ["[tool.importlinter]", 'root_packages = ["atlas_core"]', "include_external_packages = true"]
    for contract in kept:
        lines.append("[[tool.importlinter.contracts]]")
        # JSON's strings, arrays and booleans are TOML's too.
        lines += [f"{key} = {_toml(value)}" for key, value in contract.items()]
    (tmp_path / "pyproject.toml").write_text("\n".join(lines))
    tool = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [tool, "--no-logo", "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    told = " ".join(result.stdout.split())
    assert result.returncode == 1, told
    assert "atlas_core.vocab.verdict -> time" in told
    assert "atlas_core.vocab is not allowed to import atlas_core.cli" in told


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, list) else f"'{value}'"
