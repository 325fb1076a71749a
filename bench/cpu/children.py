"""Starting both engines and asking them; what the machine can do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
PROMPT = [(37 * i + 11) % 40000 + 100 for i in range(512)]


class Child:
    """A running engine. ``ready`` has what it said of its start, ``spawned`` the seconds from its start to its first token."""

    def __init__(self, command: Sequence[str]) -> None:
        began = time.perf_counter()
        # Installed packages have their modules compiled; a checkout must be allowed to keep them.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # Threads of numpy's that neither engine has a use for, and that spin while it is imported; Atlas's server says so itself.
        environment["OPENBLAS_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.ready: dict[str, Any] = self._answer()
        self.spawned = time.perf_counter() - began

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, **request: Any) -> Any:
        """One request, one answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def prompt(self, tokens: int) -> tuple[float, float]:
        """(tokens per CPU second, tokens per second) of one prompt."""
        cpu, wall = self.ask(what="run", prompt=PROMPT[:tokens], tokens=0)[0]
        return tokens / cpu, tokens / wall

    def decode(self, tokens: int) -> tuple[float, float]:
        """The same of tokens that follow a short prompt."""
        steps = self.ask(what="run", prompt=PROMPT[:8], tokens=tokens)[1:]
        return len(steps) / sum(cpu for cpu, _ in steps), len(steps) / sum(wall for _, wall in steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Engines:
    """How each engine is started. ``peer`` is a Python that has llama-cpp-python."""

    names = ("atlas", "peer")

    def __init__(self, peer: str, numerics: str = "fast") -> None:
        self._peer, self._numerics = peer, numerics

    def start(self, name: str, model: Path, threads: int) -> Child:
        """A child that has given its first token."""
        if name == "atlas":
            script = [sys.executable, str(HERE / "atlas_child.py"), str(model), str(threads), self._numerics]
            return Child(script)
        return Child([self._peer, str(HERE / "peer_child.py"), str(model), str(threads)])

    def quantise(self, source: Path, target: Path, kind: int) -> None:
        """Encode a file again by llama.cpp itself."""
        command = [self._peer, str(HERE / "peer_child.py"), "quantise", str(source), str(target), str(kind)]
        subprocess.run(command, check=True)


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    burn = "while True: sum(range(10000))"
    processes = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_bandwidth() -> float:
    """Bytes a second that one thread reads from memory, by summing 256 MiB; an estimate from below."""
    import numpy as np

    data = np.ones(1 << 25, np.int64)
    best = 0.0
    for _ in range(5):
        began = time.process_time()
        np.bitwise_or.reduce(data)
        best = max(best, data.nbytes / (time.process_time() - began))
    return best
