"""A server on a free port for real clients, with an engine process that plays scripts (see scripted_model.py)."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from atlas_core.engine.client import ProcessClient
from atlas_core.plugins import discover
from atlas_core.plugins.load import load
from atlas_core.server.app import Application
from atlas_core.server.listen import bind_socket, url_of
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import ServedModel, Service
from atlas_core.server.run import DrainingServer
from atlas_core.text.dialect.choice import choose
from atlas_core.text.template import ChatTemplate

FOLDER = str(Path(__file__).parent)
sys.path.insert(0, FOLDER)

import scripted_model  # noqa: E402 the engine process imports it from the same place

NPM = Path(sys.prefix) / "clients" / "node_modules" / ".bin"


class Silent:
    """A reporter."""

    def progress(self, progress):
        pass

    def ready(self, url, info):
        pass

    def notice(self, text):
        pass


class ScriptedServer:
    """``url`` is its root. ``conversations`` is what the model was told, request by request: ``messages`` and ``tools``.

    ``requests`` are (method, path, headers, body) as they came.
    """

    def __init__(self, scripts, delay, options):
        self.conversations = []
        self.requests = []
        self._settings = json.dumps({"scripts": scripts, "delay": delay}).encode()
        app = Application(self._bring_up, options, Silent())
        listener = bind_socket("127.0.0.1", 0)
        self.url = app.url = url_of(listener)
        app.asgi = self._recorded(app.asgi)
        self._server = DrainingServer(app)
        app.failed = self._server.stop
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        self._wait()

    def stop(self):
        self._server.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _wait(self):
        end = time.monotonic() + 60
        while httpx.get(f"{self.url}/health", trust_env=False).status_code != 200:
            assert time.monotonic() < end, "the engine did not become ready"
            time.sleep(0.02)

    async def _bring_up(self, on_progress):
        client = ProcessClient("scripted_model:build", self._settings)
        await client.start(on_progress)
        generate, tokenizer = client.generate, scripted_model.Tokenizer()

        def recorded(request, sink=None):
            self.conversations.append(json.loads(tokenizer.decode(request.prompt)))
            return generate(request, sink)

        client.generate = recorded
        dialects = {name: load(found.dialect, "atlas_core")() for name, found in discover().dialects.items()}
        speech = choose(dialects, "", tools=("hermes",), reasoning=("think",))
        template = ChatTemplate(scripted_model.TEMPLATE, {}, strftime=time.strftime)
        return Service(client, ServedModel(("scripted",), tokenizer, template, 1700000000, speech=speech))

    def _recorded(self, app):
        async def outer(scope, receive, send):
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            body = bytearray()

            async def heard():
                message = await receive()
                if message["type"] == "http.request":
                    body.extend(message.get("body", b""))
                return message

            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            try:
                await app(scope, heard, send)
            finally:
                self.requests.append((scope["method"], scope["path"], headers, bytes(body)))

        return outer


@pytest.fixture(scope="module")
def play():
    """Start servers: ``play(scripts, delay=0.0, options fields…)``; ``scripts`` are lists of ``turn(…)`` by name."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("PYTHONPATH", os.pathsep.join([FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])]))

        def start(scripts, *, delay=0.0, **options):
            server = ScriptedServer(scripts, delay, ServerOptions(**options))
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def npm_client():
    """``npm_client(name)``: the path of a command-line client that npm installs (see package.json)."""

    def find(name):
        if (NPM / name).exists():
            return str(NPM / name)
        if shutil.which("npm") is None:
            pytest.skip("needs npm: it installs the command-line clients")
        raise AssertionError(f"{NPM / name} is not there: make clients")

    return find


@pytest.fixture
def run_client(tmp_path):
    """``run_client(*command, **environment)``: run a client in an empty home and folder; gives what it printed."""
    home, folder = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    folder.mkdir()

    def run(*command, timeout=100, **environment):
        clean = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8", "NO_PROXY": "*"}
        done = subprocess.run(
            command, env=clean | environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    run.home, run.folder = home, folder
    return run
