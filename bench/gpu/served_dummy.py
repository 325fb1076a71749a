"""A model of full size with made-up weights, as served over HTTP: seconds until it is ready, tokens a second of N clients, experts read.

    python bench/gpu/served_dummy.py CONFIG.json [--hardware hopper] [--clients 1 64] [--count | --count-only] [-- OPTIONS OF atlas serve]

Starts ``atlas serve --load-format dummy`` on the configuration, beside which a byte-level tokenizer of its size is made up. Every client
sends a prompt of its own, so that sequences go to different experts. The rate of N clients is the difference between long answers and
short ones to N prompts, so that reading the prompts does not count. ``--count`` starts the server a second time with
``--count-experts``, without the launches that keep their choice of experts to themselves, and prints how many distinct ones a mixture read.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import start_up

PORT = 8918
BASE = f"http://127.0.0.1:{PORT}"
WAIT = 120.0


@contextlib.contextmanager
def serving(folder: Path, options: Sequence[str]) -> Iterator[float]:
    """A server that is ready; the seconds that took."""
    began = time.perf_counter()
    server = subprocess.Popen([
        sys.executable, "-m", "atlas_core", "serve", str(folder), "--load-format", "dummy", "--port", str(PORT), *options
    ])  # fmt: skip
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{BASE}/health", timeout=5).close()
                break
            if server.poll() is not None or time.perf_counter() - began > WAIT:
                raise SystemExit(f"the server did not start: {server.poll()}")
            time.sleep(0.02)
        yield time.perf_counter() - began
    finally:
        server.terminate()
        server.wait()


def answer(prompt: Sequence[int], tokens: int) -> str:
    """A greedy answer of so many tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{BASE}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT) as got:
        found = json.load(got)
    if found["usage"]["completion_tokens"] != tokens:
        raise SystemExit(f"{tokens} tokens were asked for: {found['usage']}")
    return str(found["choices"][0]["text"])


def prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def timed(asked: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[str]]:
    """Seconds until all clients have their answers, and those."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(asked)) as clients:
        texts = list(clients.map(lambda prompt: answer(prompt, tokens), asked))
    return time.perf_counter() - began, texts


def rate(clients: int, options: argparse.Namespace, vocabulary: int) -> str:
    """Tokens a second; that answers to prompts that differ do too, and those to the same prompt begin alike."""
    short, long = options.tokens
    asked = [prompts(clients, options.prompt, vocabulary, 2 * clients + again) for again in range(2)]
    timed(prompts(1, options.prompt, vocabulary, 999), 4)
    once, _ = timed(asked[0], short)
    whole, texts = timed(asked[1], long)
    return (
        f"{clients} clients: {clients * (long - short) / (whole - once):.0f} tok/s, "
        f"{1e6 * (whole - once) / (long - short):.0f} µs a step; {len(set(texts))} different answers"
    )


def load() -> tuple[int, int, int]:
    """(distinct experts read, mixtures run, sequences running) so far."""
    with urllib.request.urlopen(f"{BASE}/metrics", timeout=WAIT) as got:
        lines = got.read().decode().splitlines()
    found = {
        line.split()[0]: int(float(line.split()[1])) for line in lines if line.startswith("atlas_") and "{" not in line
    }
    read, run, running = (
        found.get(f"atlas_{name}", 0) for name in ("experts_read_total", "mixtures_run_total", "requests_running")
    )
    return read, run, running


def distinct(clients: int, options: argparse.Namespace, vocabulary: int) -> float:
    """Distinct experts a mixture, while all clients are answered and no prompt is read: such steps are not counted."""
    asked = prompts(clients, options.prompt, vocabulary, 2 * clients)
    seen = []
    with ThreadPoolExecutor(1) as side:
        ending = side.submit(timed, asked, options.tokens[1])
        while not ending.done():
            seen.append(load())
            time.sleep(0.02)
    full = [(read, run) for read, run, running in seen if running == clients and run > seen[0][1]]
    if len(full) < 2 or full[-1][1] == full[0][1]:
        raise SystemExit(f"{clients} clients were never answered at once for long: ask for more tokens")
    return (full[-1][0] - full[0][0]) / (full[-1][1] - full[0][1])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--hardware", default="hopper")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, nargs=2, default=[32, 232], help="of a short answer and of a long one")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--count-only", action="store_true")
    given = [*sys.argv[1:], "--"]
    options = parser.parse_args(given[: given.index("--")])
    config: dict[str, Any] = json.loads(options.config.read_text())
    vocabulary = int(config.get("text_config", config)["vocab_size"])
    flags = ["--hardware", options.hardware, *given[given.index("--") + 1 : -1]]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(start_up.tokenizer(vocabulary)))
        if not options.count_only:
            with serving(folder, flags) as ready:
                print(f"ready after {ready:.2f} s", flush=True)
                for clients in options.clients:
                    print(rate(clients, options, vocabulary), flush=True)
        if options.count or options.count_only:
            with serving(folder, [*flags, "--count-experts"]) as ready:
                for clients in options.clients:
                    found = distinct(clients, options, vocabulary)
                    print(f"{clients} clients: {found:.1f} distinct experts a mixture", flush=True)


if __name__ == "__main__":
    main()
