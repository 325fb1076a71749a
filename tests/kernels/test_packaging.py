"""The wheel of a kernel distribution: built by hatchling with the hook that every such distribution uses."""

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "plugins/atlas_plugin_cpu/hatch_build.py"
PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "toy-kernels"
version = "1"
[tool.hatch.build.targets.wheel]
packages = ["src/toy_kernels"]
[tool.hatch.build.targets.wheel.hooks.custom]
"""


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def project(tmp_path):
    """A distribution with one source, compiled for one architecture that travels and one that does not."""
    files = {
        "pyproject.toml": PYPROJECT,
        ".gitignore": "_compiled/\n",
        "src/toy_kernels/__init__.py": "",
        "src/toy_kernels/kernels/toy/HARDWARE.toml": "[hardware]\nname = 'toy'\nvendor = 'v'\narchs = ['sm_1']\n",
        "src/toy_kernels/kernels/toy/common/KERNEL.toml": "",
        "src/toy_kernels/kernels/toy/common/scale.cu": "scale",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(HOOK, tmp_path / "hatch_build.py")
    kernels = tmp_path / "src/toy_kernels/kernels"
    for arch in ("sm_1", "native-01234567"):
        folder = tmp_path / "src/toy_kernels/_compiled/toy" / arch / "common"
        folder.mkdir(parents=True)
        (folder / "scale.cubin").write_text(arch)
        (folder / ".lock").touch()
        module = {
            "file": "scale.cubin", "sha256": digest(folder / "scale.cubin"),
            "files": {
                "toy_kernels:toy/common/scale.cu": digest(kernels / "toy/common/scale.cu"),
                "atlas_core:include/x.h": "0",
            },
        }  # fmt: skip
        declarations = {
            f"toy_kernels:{name}": digest(kernels / name) for name in ("toy/HARDWARE.toml", "toy/common/KERNEL.toml")
        }
        content = {"hardware": "toy", "arch": arch, "declarations": declarations, "modules": {"scale": module}}
        (folder / "manifest.json").write_text(json.dumps(content))
    return tmp_path


def build(project, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(project / "dist")],
        cwd=project, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = list((project / "dist").glob("*.whl")) if done.returncode == 0 else []
    return (wheels[0], set(zipfile.ZipFile(wheels[0]).namelist())) if wheels else (None, done.stdout + done.stderr)


def declare(project, *archs):
    """Let HARDWARE.toml declare other architectures, as if everything had been compiled since."""
    path = project / "src/toy_kernels/kernels/toy/HARDWARE.toml"
    old = digest(path)
    path.write_text(f"[hardware]\nname = 'toy'\nvendor = 'v'\narchs = {list(archs)}\n")
    for manifest in (project / "src/toy_kernels/_compiled").rglob("manifest.json"):
        manifest.write_text(manifest.read_text().replace(old, digest(path)))


def compiled(names):
    return {name.removeprefix("toy_kernels/_compiled/") for name in names if "_compiled" in name}


def test_a_wheel_carries_what_travels_and_nothing_else(project):
    wheel, names = build(project)
    assert compiled(names) == {"toy/sm_1/common/scale.cubin", "toy/sm_1/common/manifest.json"}
    assert "toy_kernels/kernels/toy/common/scale.cu" in names
    assert wheel.name.endswith("-none-any.whl")


@pytest.mark.parametrize(
    ("arch", "machine"), [("x86-64-v4-vnni", "x86_64"), ("aarch64-i8mm", "aarch64"), ("aarch64", "aarch64")]
)
def test_a_wheel_for_a_processor_names_its_machine_and_others_stay_at_home(project, arch, machine):
    folder = project / "src/toy_kernels/_compiled/toy"
    content = json.loads((folder / "sm_1/common/manifest.json").read_text()) | {"arch": arch}
    (folder / "sm_1").rename(folder / arch)
    (folder / arch / "common/manifest.json").write_text(json.dumps(content))
    declare(project, arch)
    wheel, names = build(project)
    if platform.machine() == machine:
        assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")
        assert compiled(names) == {f"toy/{arch}/common/scale.cubin", f"toy/{arch}/common/manifest.json"}
    else:
        assert wheel is None
        assert "no kernels of toy/common to package" in names


@pytest.mark.parametrize(
    "name", ["kernels/toy/common/scale.cu", "kernels/toy/common/KERNEL.toml", "_compiled/toy/sm_1/common/scale.cubin"]
)
def test_what_is_stale_is_not_packaged(project, name):
    (project / "src/toy_kernels" / name).write_text("changed")
    wheel, said = build(project)
    assert wheel is None
    assert "is missing or not what was compiled" in said
    assert "atlas kernels build --hw toy --arch sm_1" in said


def test_what_is_declared_no_more_stays_at_home(project):
    shutil.copytree(project / "src/toy_kernels/_compiled/toy/sm_1", project / "src/toy_kernels/_compiled/toy/sm_0")
    (project / "src/toy_kernels/_compiled/toy/sm_0/common/scale.cubin").write_text("stale")
    _, names = build(project)
    assert compiled(names) == {"toy/sm_1/common/scale.cubin", "toy/sm_1/common/manifest.json"}
    declare(project, "sm_2")
    wheel, said = build(project)
    assert wheel is None
    assert "no kernels of toy/common to package" in said


def test_a_wheel_without_binaries_is_made_on_request_only(project):
    shutil.rmtree(project / "src/toy_kernels/_compiled/toy/sm_1")
    wheel, said = build(project)
    assert wheel is None
    assert "no kernels of toy/common to package" in said
    _, names = build(project, ATLAS_SKIP_BUILD="1")
    assert compiled(names) == set()
