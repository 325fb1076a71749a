"""``atlas serve`` as an operator starts it, and clients on the other side of its socket."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from serving import START_SECONDS, TINY, Server

from atlas_core.cli.exits import EXIT_CODES
from atlas_core.vocab.errors import EngineError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("serve") / "log", "--max-batch-size", "4", "--served-model-name", "tiny")
    try:
        yield running
    finally:
        assert running.stop() == 0, running.log.read_text()
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def golden() -> dict[str, list[int]]:
    with np.load(TINY / "golden.npz") as file:
        return {name: file[name].tolist() for name in ("input_ids", "gen_ids", "long_ids", "long_gen_ids")}


def greedy(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    return dict(server.complete(**body)["choices"][0])


def test_the_reference_ids(server: Server, golden: dict[str, list[int]]) -> None:
    assert greedy(server, golden["input_ids"])["token_ids"] == golden["gen_ids"]
    assert greedy(server, golden["long_ids"])["token_ids"] == golden["long_gen_ids"]


def test_the_same_alone_and_among_others(server: Server, golden: dict[str, list[int]]) -> None:
    prompts = [golden["input_ids"][:size] for size in (1, 3, 8, 17)] + [golden["long_ids"], golden["input_ids"]]
    alone = [greedy(server, prompt) for prompt in prompts]
    sampled = server.complete(prompt=prompts[3], temperature=0.9, seed=1234, max_tokens=20)["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(server.complete, prompt=[5], temperature=1, max_tokens=60) for _ in range(2)]
        seeded = pool.submit(server.complete, prompt=prompts[3], temperature=0.9, seed=1234, max_tokens=20)
        together = list(pool.map(lambda prompt: greedy(server, prompt), prompts))
        assert seeded.result()["choices"][0]["text"] == sampled
        assert noise[0].result()["choices"][0]["text"] != noise[1].result()["choices"][0]["text"]
    assert together == alone


def test_case_19_seeds(server: Server) -> None:
    def ask(**more: Any) -> str:
        return str(server.complete(prompt=[3, 1, 4], max_tokens=20, ignore_eos=True, **more)["choices"][0]["text"])

    alone = ask(temperature=0.9, seed=1234)
    for _ in range(4):
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(ask, temperature=0.9)
            assert pool.submit(ask, temperature=0.9, seed=1234).result() == alone
            other.result()
    assert len({ask(temperature=1) for _ in range(3)}) > 1
    assert len({ask(temperature=0.9, seed=seed) for seed in (-1, 1, 2**32 + 1, 2**63 - 1, -(2**63))}) > 1


def test_a_stream_says_the_same(server: Server, golden: dict[str, list[int]]) -> None:
    body = {"max_tokens": 24, "temperature": 0, "logprobs": 3, "return_token_ids": True, "prompt": golden["input_ids"]}
    whole = server.complete(**body)
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    wanted = whole["choices"][0]
    assert "".join(choice["text"] for choice in choices) == wanted["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == wanted["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for choice in choices for value in choice["logprobs"][name]] == wanted["logprobs"][name]


def test_stop_strings_cut_the_same_text(server: Server, golden: dict[str, list[int]]) -> None:
    text = greedy(server, golden["input_ids"])["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = greedy(server, golden["input_ids"], stop=[stop])
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_text_and_ids_are_the_same_prompt(server: Server) -> None:
    ids = server.http.post("/tokenize", json={"prompt": "hello wörld"}).json()["tokens"]
    by_text = server.complete(prompt="hello wörld", max_tokens=8, temperature=0, return_token_ids=True)["choices"][0]
    assert by_text["prompt_token_ids"] == ids
    assert by_text["token_ids"] == greedy(server, ids, max_tokens=8, ignore_eos=False)["token_ids"]


def test_chat_through_the_sdk(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0,
            "logprobs": True, "top_logprobs": 2,
        }  # fmt: skip
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    entries = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries is not None
    assert len(entries) == whole.usage.completion_tokens
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode(errors="replace") == text


def test_the_context_ends_the_answer(server: Server) -> None:
    body = server.complete(prompt=[7] * 500, max_tokens=100, ignore_eos=True)
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (12, "length")
    response = server.http.post("/v1/completions", json={"prompt": [7] * 512})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    for _ in range(50):
        if server.gauge("atlas_sequences_inside") == server.gauge("atlas_requests_running") == 0:
            break
        server.complete(prompt=[5], max_tokens=1)  # gauges come with steps
    assert server.gauge("atlas_requests_running") == server.gauge("atlas_kv_tokens_used") == 0


def test_a_signal_finishes_what_runs_and_leaves_no_process(tmp_path: Path) -> None:
    server = Server(tmp_path / "log")
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert len(children) == 1
    body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    server.http.close()
    assert server.process.wait(20) == 0
    assert not Path(f"/proc/{children[0]}").exists()
    assert "draining" in server.log.read_text()


def test_a_log_that_cannot_be_written_stops_nobody() -> None:
    """Nowhere to print: a full disk."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "atlas_core", "serve", str(TINY), "--hw", "cpu", "--port", str(port)]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if http.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3}).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def killed_while_streaming(server: Server) -> str:
    """Kill the engine's process below a stream; the code of the error that ends it."""
    (child,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(int(child), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    code: str = json.loads(last.removeprefix("data: "))["error"]["code"]
    return code


def test_a_server_that_is_to_be_started_again_ends_with_its_engine(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--exit-on-fault")
    assert killed_while_streaming(server) == "faulted"
    server.http.close()
    assert server.process.wait(20) == EXIT_CODES[EngineError]
    assert "error: the engine process ended unexpectedly" in server.log.read_text()


def test_a_killed_engine_fails_its_requests_and_the_server_says_so(tmp_path: Path) -> None:
    server = Server(tmp_path / "log")
    assert killed_while_streaming(server) == "faulted"
    health = server.http.get("/health").json()
    assert (health["status"], health["message"]) == ("faulted", "the engine process ended unexpectedly")
    assert "killed by signal 9" in health["why"]
    assert "E the engine has failed: the engine process ended unexpectedly" in server.log.read_text()
    refused = server.http.post("/v1/completions", json={"prompt": [5]})
    assert refused.headers["x-should-retry"] == "false"
    assert server.stop() == 0
