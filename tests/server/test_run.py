"""Sockets, signals and exit codes, in a process of its own as an operator would see them."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from atlas_core.server.listen import bind_socket, url_of
from atlas_core.vocab.errors import UsageError

PROGRAM = r"""
import asyncio, sys, time
from atlas_core.server.app import Application
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import ServedModel, Service
from atlas_core.server.listen import bind_socket
from atlas_core.server.run import run
from atlas_core.server.background import in_background
from atlas_core.vocab.errors import AtlasError, BudgetError, EngineError
from atlas_core.vocab.messages import Delta, Gauges, Ready

mode, timeout = sys.argv[1], float(sys.argv[2])

class Engine:
    state, info, gauges, closed = "ready", Ready(512, 8, 260, "fp"), Gauges(), False
    async def generate(self, request, sink=None):
        for count in range(request.sampling.max_tokens):
            await asyncio.sleep(0.02)
            if self.closed:
                raise EngineError("the engine is gone", state="gone")
            last = count + 1 == request.sampling.max_tokens
            yield Delta(request.id, (97,), "a", finish="length" if last else None, prompt_tokens=1, completion_tokens=count + 1)
    async def drain(self, seconds):
        self.state = "draining"
    async def close(self):
        self.closed = True

class Tokenizer:
    special_ids = special_tokens = frozenset()
    def encode(self, text, **more):
        return [*text.encode()]
    def decode(self, ids, **more):
        return bytes(ids).decode()

class Lines:
    def progress(self, progress): pass
    def ready(self, url, info): print(url, flush=True)
    def notice(self, text): print(text, flush=True)

async def bring_up(on_progress):
    if mode == "fail":
        raise BudgetError("too big")
    if mode == "slow":
        print("loading", flush=True)
        await in_background(lambda: time.sleep(60))
    return Service(Engine(), ServedModel(("m",), Tokenizer(), None, 0))

app = Application(bring_up, ServerOptions(drain_timeout=timeout), Lines())
try:
    sys.exit(run(app, bind_socket("127.0.0.1", 0)))
except AtlasError as error:
    print(type(error).__name__, flush=True)
    sys.exit(7)
"""


class Server:
    def __init__(self, mode="serve", timeout=10):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, mode, str(timeout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.first = self.process.stdout.readline().strip()

    def stream(self, tokens, into):
        body = {"prompt": "x", "max_tokens": tokens, "stream": True}
        with httpx.stream("POST", f"{self.first}/v1/completions", json=body, timeout=20, trust_env=False) as response:
            into["status"] = response.status_code
            for line in response.iter_lines():
                into.setdefault("lines", []).append(line)

    def end(self):
        out, err = self.process.communicate(timeout=10)
        return self.process.returncode, out, err


@pytest.fixture
def start():
    servers = []

    def begin(*args):
        servers.append(Server(*args))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.kill()
        server.process.communicate()


def streaming(kit, server, tokens):
    got = {}

    def read():
        try:
            server.stream(tokens, got)
        except httpx.TransportError as error:
            got["error"] = error

    thread = threading.Thread(target=read)
    thread.start()
    kit.until(lambda: len(got.get("lines", [])) >= 2)
    return thread, got


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(start, kit, sig):
    server = start()
    thread, got = streaming(kit, server, 60)
    server.process.send_signal(sig)
    health = "ready"
    while health == "ready":
        health = httpx.get(f"{server.first}/health", trust_env=False).json()["status"]
    assert health == "draining"
    refused = httpx.post(f"{server.first}/v1/completions", json={"prompt": "x"}, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    thread.join(10)
    assert [line for line in got["lines"] if line][-1] == "data: [DONE]"
    assert "error" not in got
    code, out, err = server.end()
    assert code == 0, err
    assert "draining" in out
    assert "Traceback" not in err


def test_what_outlasts_the_deadline_is_told_so(start, kit):
    server = start("serve", 0.3)
    thread, got = streaming(kit, server, 100_000 // 250)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    thread.join(10)
    last = [line for line in got["lines"] if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert server.end()[0] == 0
    assert 0.3 <= time.monotonic() - begun < 4


def test_the_second_signal_ends_at_once(start, kit):
    server = start("serve", 60)
    thread, got = streaming(kit, server, 400)
    server.process.send_signal(signal.SIGTERM)
    kit.until(lambda: httpx.get(f"{server.first}/health", trust_env=False).json()["status"] == "draining")
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    try:
        assert server.process.wait(2) == 128 + signal.SIGTERM
    finally:
        thread.join(5)
    assert time.monotonic() - begun < 2
    assert "error" in got


def test_idle_servers_end_quickly_with_zero(start):
    server = start()
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert time.monotonic() - begun < 3


def test_a_signal_while_loading_ends_it(start):
    server = start("slow")
    assert server.first == "loading"
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert time.monotonic() - begun < 3


def test_a_failed_start_is_raised_out_of_run(start):
    server = start("fail")
    assert server.first == "BudgetError"
    assert server.end()[0] == 7


def test_a_busy_port_fails_with_what_why_and_cure():
    with bind_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(UsageError) as caught:
            bind_socket("127.0.0.1", port)
    assert (caught.value.what, caught.value.cure) == (
        f"port {port} on 127.0.0.1 is in use", "stop it, or choose another with --port"
    )  # fmt: skip
    bind_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["256.1.1.1", "no such host", "203.0.113.7"])
def test_addresses_that_are_not_ours(host):
    with pytest.raises(UsageError, match="--bind"):
        bind_socket(host, 0)


def test_urls():
    with bind_socket("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://localhost:")
    if socket.has_dualstack_ipv6():
        with bind_socket("::1", 0) as listener:
            assert url_of(listener).startswith("http://[::1]:")
