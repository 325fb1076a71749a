"""The real command, in a process of its own."""

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    def expect(self, code, *told):
        """The exit code, one error with what, why and cure that says all of ``told``, and no traceback."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        assert re.search(r"^error: \S", self.err, re.MULTILINE), self.err
        assert re.search(r"^  cure: \S", self.err, re.MULTILINE), self.err
        shown = " ".join(self.err.split())
        assert [text for text in told if text not in shown] == [], self.err


@pytest.fixture(scope="session")
def clean_environment():
    """The variables of this process without any that Atlas, Python, pip or the Hub's library reads."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("ATLAS_", "HF_", "PYTHON", "PIP_"))}


@pytest.fixture
def atlas(tmp_path, clean_environment):
    """``atlas(*arguments, typed="", **variables)`` with an empty cache, no Hub, and nothing else of the caller's settings."""

    def run(*arguments, typed="", **variables):
        own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "atlas_core", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=tmp_path, env={**clean_environment, **own, **variables}, input=typed, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        return Said(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def server(clean_environment):
    """The URL of a server of a small random Llama that asks for the key ``secret``."""
    command = [sys.executable, "-m", "atlas_core", "serve", str(TINY), "--port", "0", "--hardware", "cpu"]
    variables = {
        **clean_environment,
        "HF_HUB_OFFLINE": "1",
        "ATLAS_API_KEY": "secret",
        "ATLAS_SERVED_MODEL_NAME": "tiny",
    }
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as process:
        lines, found = [], threading.Event()

        def read():
            for line in process.stderr:
                lines.append(line)
                if line.startswith("ready: "):
                    found.set()
            found.set()

        thread = threading.Thread(target=read)
        thread.start()
        try:
            assert found.wait(60), "".join(lines)
            match = re.search(r"^ready: (\S+)/v1", "".join(lines), re.MULTILINE)
            assert match, "".join(lines)
            yield match[1]
        finally:
            process.terminate()
            thread.join()
