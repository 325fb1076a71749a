"""The repository as the architecture tests see it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IGNORED = {".git", ".hypothesis", ".venv", "dist", "_compiled", "__pycache__"}


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def packages() -> dict[str, Path]:
    """Every distribution's import package, by name: the folder of its sources."""
    projects = sorted([*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")])
    return {path.parent.name: path.parent / "src" / path.parent.name for path in projects}


@pytest.fixture(scope="session")
def modules(packages) -> list[Path]:
    return [path for folder in packages.values() for path in sorted(folder.rglob("*.py"))]


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Every file of the repository; without git, what lies in the tree."""
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z"]
    try:
        told = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return sorted(_walk(ROOT))
    return [path for name in told.split("\0") if name and (path := ROOT / name).is_file()]


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in IGNORED or path.name.endswith(("_cache", ".egg-info")):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path
