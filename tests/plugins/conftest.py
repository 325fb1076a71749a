"""Installing toy distributions: a module and a dist-info folder, which is all that discovery looks at."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(dist, source, group=..., key=..., version=...)``: ``source`` becomes a module with an object ``plugin``."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def put(dist: str, source: str, *, group: str = "atlas.models", key: str = "toy", version: str = "1.0") -> None:
        module = dist.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(PREAMBLE + dedent(source))
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{key} = {module}:plugin\n")

    yield put
    for name in set(sys.modules) - before:
        if name.startswith("toy"):
            del sys.modules[name]


PREAMBLE = """\
from atlas_core.contracts.declarations import *
from atlas_core.hookspecs import hookimpl

"""
