"""The front door on a machine that lacks something: make says what, and leaves nothing behind."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def make(folder, python):
    return subprocess.run(
        ["make", "serve", f"PYTHON={python}"], cwd=folder, check=False, text=True, capture_output=True, timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
    )  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    shutil.copy(MAKEFILE, tmp_path)
    (tmp_path / "constraints.txt").touch()
    return tmp_path


def fake(folder, body):
    """A program that stands for a Python interpreter."""
    path = folder / "fakepython"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_an_old_python_is_refused_before_anything_is_made(checkout):
    """It runs the check of the Makefile under another version of itself."""
    python = fake(checkout, 'shift; exec python3 -c "import sys; sys.version_info = (3, 10, 12); $1"')
    done = make(checkout, python)
    assert done.returncode != 0
    assert (
        f"Atlas needs Python 3.11 or newer, and {python} is 3.10. Name another: make serve PYTHON=python3.12"
        in done.stderr
    )
    assert not (checkout / ".venv").exists()


def test_a_python_without_venv_leaves_no_half_environment(checkout):
    """As Debian's does without python3-venv: it makes the folders, then finds that it has no pip to put there."""
    python = fake(
        checkout,
        '[ "$1" = -c ] && exit 0; mkdir -p .venv/bin; touch .venv/bin/python; echo "ensurepip is not available" >&2; exit 1',
    )
    done = make(checkout, python)
    assert done.returncode != 0
    assert "ensurepip is not available" in done.stderr
    assert not (checkout / ".venv").exists()
