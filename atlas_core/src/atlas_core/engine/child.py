"""The engine's process and the Unix socket to it; it may be started long before there is an event loop to serve it with."""

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from atlas_core.vocab.errors import EngineError


class EngineProcess:
    """``python -m atlas_core.engine.process``, which connects to ``listener``: once, in a directory that nobody else can enter."""

    def __init__(self, prepare: str = "", early: bytes = b"") -> None:
        """``prepare`` is ``module:attr`` of what the process calls while it waits for its orders: (bytes | None) → serving.Build.

        ``early`` are the settings that will be ordered, as far as can be known: ``prepare`` is given them, and the process begins to build with them.

        Raises EngineError when socket or process cannot be had.
        """
        self._folder = tempfile.mkdtemp(prefix="atlas-")  # mode 0700
        path = str(Path(self._folder) / "engine")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.listener.bind(path)
            self.listener.listen(1)
            more = [*(["--prepare", prepare] if prepare else []), *(["--early"] if early else [])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "atlas_core.engine.process", "--socket", path, *more],
                stdin=subprocess.PIPE if early else subprocess.DEVNULL,
            )
            if self._process.stdin is not None:
                self._process.stdin.write(early)
                self._process.stdin.close()
        except OSError as error:
            self.forget_socket()
            raise EngineError(
                f"the engine's socket {path} cannot be made, or its process not started", str(error),
                "set TMPDIR to a short path", state="gone",
            ) from error  # fmt: skip
        self._status: Future[int] = Future()
        threading.Thread(target=self._watch, name="atlas-engine-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status; negative, a signal's number; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """The exit status, once it has ended."""
        return await asyncio.shield(asyncio.wrap_future(self._status))

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def forget_socket(self) -> None:
        """Nobody connects any more. Safe to call twice."""
        self.listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave no process behind: one that was never asked to do anything is ended here."""
        self.forget_socket()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        self._status.set_result(self._process.wait())
