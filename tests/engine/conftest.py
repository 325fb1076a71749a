"""The scripted engine is a module beside the tests, so that a child process can import it too."""

import os
import sys
from pathlib import Path

import pytest

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "scheduler")]
sys.path[:0] = FOLDERS


@pytest.fixture
def child_path(monkeypatch):
    """Lets a child process import what the tests import."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]))
