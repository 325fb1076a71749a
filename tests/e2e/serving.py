"""A server as an operator starts it: ``atlas serve`` over a tiny checkpoint, in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
START_SECONDS = 60


class Server:
    """One process, told apart by what it prints."""

    def __init__(self, log: Path, *flags: str, model: Path = TINY) -> None:
        command = [sys.executable, "-m", "atlas_core", "serve", str(model), "--hw", "cpu", "--port", "0", *flags]
        self.log = log
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ATLAS_")}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.url = self._url()
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def _url(self) -> str:
        for _ in range(START_SECONDS * 20):
            found = re.search(r"^ready: (\S+)/v1", self.log.read_text(), re.MULTILINE)
            if found:
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(self.log.read_text())

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def gauge(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    def stop(self) -> int:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """The choices of a streamed completion."""
        with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield from json.loads(line[6:])["choices"]
