"""A server whose GPU fails, as its clients and its operator see it: python faults.py [token|launch|memory ...].

Serves a tiny model on the hardware ``trap`` (atlas-plugin-trap beside this file), which is any H100 or H200 with one kernel more:

  token   a request whose token makes that kernel write to nowhere, while others run: all of them end with an error that has a type,
          /health and /live say 503 with what, why and cure, new requests are refused, the log names the failure, the engine is
          gone, the next server of this machine works
  launch  a launch that the driver refuses: the start ends with exit code 8, and names kernel, geometry and arguments
  memory  another program holds all memory but a little, or nearly all: the start ends with exit code 7 or 8, and says what to lower

--build compiles trap's kernels, which needs nvcc and no GPU. Exits with 1 unless everything is as it should be.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLUGIN = HERE / "atlas-plugin-trap"
MODEL = HERE.parents[3] / "tests" / "data" / "tiny" / "qwen3"
FATAL = 77
"""The token that atlas_plugin_trap waits for."""
STREAMS, TOKENS = 3, 400
SMALL = ("--memory", "256MiB")
WAIT = 60.0
HOG = f"""
import sys, time
sys.path[:0] = [{str(HERE)!r}]
from conformance import library
from atlas_nvidia.backend import open_backend
spared = int(sys.argv[1])
gpu = open_backend(library())
gpu.bind_to_thread()
while (free := gpu.memory()[0]) > spared + (2 << 20):
    gpu.alloc(min(free - spared, 16 << 30))
print(free, flush=True)
time.sleep({WAIT})
"""
"""A program that holds all device memory but so many bytes."""
SOME, NEXT_TO_NONE = 2 << 30, 32 << 20
"""Enough for a context of the driver but not for the plan, and not enough for that either."""


def environment(site: Path, **more: str) -> dict[str, str]:
    """With the plugin as if it were installed: its sources, and the few lines of metadata that an installer would write."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    folder = site / f"atlas_plugin_trap-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    (folder / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups)
    )
    path = os.pathsep.join((str(site), str(PLUGIN / "src"), os.environ.get("PYTHONPATH", "")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATLAS_")}
    return {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def serving(*flags: str) -> list[str]:
    """The command."""
    return [
        sys.executable, "-m", "atlas_core", "serve", str(MODEL), "--hardware", "trap", "--transcode", "bf16", "--port", "0",
        *flags,
    ]  # fmt: skip


class Server:
    """One that is ready."""

    def __init__(self, site: Path, *flags: str) -> None:
        self.log = site / "log"
        with self.log.open("w") as file:
            self.process = subprocess.Popen(serving(*flags), stdout=file, stderr=file, env=environment(site))
        ended = time.monotonic() + WAIT
        while not (found := re.search(r"^ready: (\S+)/v1", self.log.read_text(), re.MULTILINE)):
            if self.process.poll() is not None or time.monotonic() > ended:
                self.process.kill()
                raise SystemExit(f"no server: {self.log.read_text()}")
            time.sleep(0.05)
        self.url = found[1]

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any], Message]:
        """(status, body, headers) of a GET, or of a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=WAIT) as answer:
                return answer.status, json.load(answer), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), error.headers

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion."""
        data = json.dumps({**body, "stream": True}).encode()
        request = urllib.request.Request(self.url + "/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def engines(self) -> list[int]:
        """Processes that it started."""
        return [int(c) for c in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT)


def body(*prompt: int, tokens: int) -> dict[str, Any]:
    """A request that never chooses the fatal token by itself."""
    return {
        "prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "logit_bias": {str(FATAL): -100},
    }  # fmt: skip


def lacking(what: str, text: str, *words: str) -> list[str]:
    """The words that a text lacks."""
    return [f"{what} lacks {word!r}: {text}" for word in words if word not in text]


def token(site: Path) -> list[str]:
    """A device that is lost while it serves."""
    server = Server(site, *SMALL)
    found: list[str] = []
    ends: list[dict[str, Any]] = []
    begun = threading.Semaphore(0)

    def follow(number: int) -> None:
        told: list[dict[str, Any]] = []
        for event in server.stream(body(number, 5, 9, tokens=TOKENS)):
            told.append(event)
            if len(told) == 2:
                begun.release()
        ends.append(told[-1] if told else {})

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(10, 10 + STREAMS)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire(timeout=WAIT)
    (engine,) = server.engines()
    status, said, _ = server.ask("/v1/completions", body(FATAL, tokens=4))
    print(f"  the fatal request: {status} {said}")
    if (status, said["error"]["code"]) != (503, "faulted"):
        found.append(f"the fatal request was answered {status} {said}")
    for thread in threads:
        thread.join(WAIT)
    print(f"  a stream's end: {ends[:1]}")
    codes = [end.get("error", {}).get("code") for end in ends]
    found += [] if codes == ["faulted"] * STREAMS else [f"streams ended with {ends}"]
    status, health, _ = server.ask("/health")
    print(f"  /health: {status} {health}")
    found += [] if (status, health.get("status")) == (503, "faulted") else [f"/health says {status} {health}"]
    found += lacking("/health", " ".join(map(str, health.values())), "CUDA_ERROR_ILLEGAL_ADDRESS", "restart", "step")
    found += [] if server.ask("/live")[0] == 503 else ["/live does not ask for a restart"]
    status, said, headers = server.ask("/v1/completions", body(5, tokens=4))
    print(f"  a new request: {status} {said}")
    if (status, said["error"]["code"], headers.get("x-should-retry")) != (503, "faulted", "false"):
        found.append(f"a new request was answered {status} {said} {headers}")
    found += lacking(
        "the log", server.log.read_text(), "the engine has failed", "CUDA_ERROR_ILLEGAL_ADDRESS", "restart the engine"
    )
    print("  the log: " + " / ".join(server.log.read_text().split("\n")[-12:]))
    ended = time.monotonic() + 10
    while Path(f"/proc/{engine}").exists() and server.engines() and time.monotonic() < ended:
        time.sleep(0.1)
    found += [f"the engine {engine} still holds the device"] if engine in server.engines() else []
    found += [] if server.process.poll() is None else ["the server is gone, and nobody answers probes"]
    found += [] if server.stop() == 0 else ["the server does not end in good order"]
    again = Server(site, *SMALL)
    status, said, _ = again.ask("/v1/completions", body(5, tokens=4))
    found += [] if status == 200 else [f"the next server answers {status} {said}"]
    again.stop()
    return found


def refused(site: Path, code: int, words: Sequence[str], *flags: str, **more: str) -> list[str]:
    """A start that must end with ``code`` and say ``words``."""
    ran = subprocess.run(
        serving(*flags), env=environment(site, **more), capture_output=True, text=True, check=False, timeout=WAIT
    )
    said = ran.stderr + ran.stdout
    print("  " + "\n  ".join(said.strip().split("\n")[-20:]))
    return [
        *([] if ran.returncode == code else [f"it ended with {ran.returncode}, not {code}"]),
        *lacking("it", said, *words),
    ]


def launch(site: Path) -> list[str]:
    """A launch that the driver refuses."""
    words = ("trap of trap", str(1 << 20), "fatal=77", "nowhere=0x1000", "CUDA_ERROR_")
    return refused(site, 8, words, *SMALL, TRAP_LAUNCH="1")


def memory(site: Path) -> list[str]:
    """No memory, since somebody else has it."""
    with hog(SOME):
        found = refused(
            site, 7, ("weights", "KV pages", "available", "lower --memory to", "MiB at most"), "--memory", "8GiB"
        )
    with hog(NEXT_TO_NONE):
        return [*found, *refused(site, 8, ("CUDA_ERROR_OUT_OF_MEMORY", "end other programs"), *SMALL)]


@contextmanager
def hog(spared: int) -> Iterator[None]:
    """While somebody holds all memory but ``spared`` bytes."""
    with subprocess.Popen([sys.executable, "-c", HOG, str(spared)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            print(f"  {int(process.stdout.readline()) >> 20} MiB are left")
            yield
        finally:
            process.kill()


PARTS: Mapping[str, Callable[[Path], list[str]]] = {"token": token, "launch": launch, "memory": memory}


def main() -> int:
    """The parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--build", action="store_true", help="only compile trap's kernels")
    asked = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        if asked.build:
            command = [sys.executable, "-m", "atlas_core", "kernels", "build", "--hw", "trap"]
            return subprocess.run(command, env=environment(Path(folder)), check=False).returncode
        for name in asked.parts or PARTS:
            print(f"{name}:", flush=True)
            found = PARTS[name](Path(folder))
            print("\n".join(f"  WRONG: {text}" for text in found) or "  as it should be", flush=True)
            wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
