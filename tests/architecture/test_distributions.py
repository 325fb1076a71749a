"""Distributions: one version, dependencies that are pinned, plugin modules that cost nothing to import."""

import importlib
import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement

import atlas_core
from atlas_core.plugins import GROUPS
from atlas_core.plugins.footprint import footprint

INSTALLED = ("dev", "clients")
"""The dependency groups of which ``make test`` makes its environment."""


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
    wanted = {name for group in INSTALLED for name in groups[group]}
    for folder in packages.values():
        found = project(folder)
        wanted |= {
            *found["dependencies"],
            *(name for extra in found.get("optional-dependencies", {}).values() for name in extra),
        }
    names = {normal(re.match(r"[A-Za-z0-9._-]+", text)[0]) for text in wanted}
    own = {normal(name) for name in packages}
    assert names - own - pinned == set()


def test_the_pins_are_what_the_declared_dependencies_bring(root, packages):
    """Nothing that an environment installs is left to the day on which it is made, and no pin outlives its reason."""
    groups = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]
    todo = [*(name for group in INSTALLED for name in groups[group]), "pip"]  # the Makefile upgrades pip
    for folder in packages.values():
        found = project(folder)
        todo += found["dependencies"]
        todo += [name for extra in found.get("optional-dependencies", {}).values() for name in extra]
    own = {normal(name) for name in packages}
    pinned = {normal(name): version for name, version in (line.split("==") for line in pins(root))}
    # The compiler where there is no other, and what hatchling asks for where it builds: not installed beside the rest.
    brought = {name: pinned[name] for name in ("ziglang", "editables")}
    seen = set()
    while todo:
        needed = Requirement(todo.pop())
        name = normal(needed.name)
        if name in own or (name, *needed.extras) in seen:
            continue
        seen.add((name, *needed.extras))
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.fail(
                f"{name} is not installed: pip install -c constraints.txt --group {' --group '.join(INSTALLED)} "
                "-e './atlas_core[otel,test]'"
            )
        brought[name] = installed.version
        for text in installed.requires or ():
            marker = Requirement(text).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *needed.extras)):
                todo.append(text)
    assert pinned == brought


def test_every_distribution_with_kernels_packages_them_with_the_same_hook(root, packages):
    """Copies, since an sdist would carry a link that leads out of it."""
    folders = [folder.parent.parent for folder in packages.values()] + sorted((root / "docs/examples").iterdir())
    hooks = {folder.name: folder / "hatch_build.py" for folder in folders if (folder / "hatch_build.py").exists()}
    machines = {
        path.relative_to(root).parts[-6]: tomllib.loads(path.read_text())["hardware"]
        for pattern in ("*/src", "plugins/*/src", "docs/examples/*/src")
        for path in root.glob(f"{pattern}/*/kernels/*/HARDWARE.toml")
    }
    assert hooks.keys() >= {name for name, hardware in machines.items() if not hardware.get("abstract", False)}
    assert len(hooks) >= 3
    assert len({path.read_bytes() for path in hooks.values()}) == 1
    assert [name for name, path in hooks.items() if path.is_symlink()] == []
    for path in hooks.values():
        wheel = tomllib.loads((path.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
            "wheel"
        ]
        assert wheel["hooks"] == {"custom": {}}, path


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


def test_a_machine_without_gpu_needs_few_packages(packages):
    """What ``pip install`` of the core, the CPU, a family and GGUF brings, themselves included."""
    todo = [Requirement(name) for name in ("atlas-core", "atlas-plugin-cpu", "atlas-model-llama", "atlas-quant-gguf")]
    seen: set[str] = set()
    while todo:
        needed = todo.pop()
        if (name := normal(needed.name)) in seen and not needed.extras:
            continue
        seen.add(name)
        # Ours from the sources: what is installed here may be of an older day.
        own = packages.get(name.replace("-", "_"))
        texts = project(own)["dependencies"] if own else importlib.metadata.distribution(name).requires or ()
        for text in texts:
            more = Requirement(text)
            if more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in ("", *needed.extras)):
                todo.append(more)
    assert len(seen) <= 30, sorted(seen)
