"""A server that keeps what it computed: turns of a chat, several answers, and what it says of it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server

PAGE = 16
LONG = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    running = Server(log, "--max-batch-size", "4", "--served-model-name", "tiny")
    try:
        yield running
    finally:
        assert running.stop() == 0, running.log.read_text()


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = server.http.post(path, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def counted(server: Server) -> float:
    """Prompt tokens that had to be computed so far."""
    return server.gauge("atlas_prompt_tokens_total") - server.gauge("atlas_cached_tokens_total")


def test_the_second_turn_computes_what_is_new(server: Server) -> None:
    history: list[dict[str, str]] = [{"role": "user", "content": LONG}]
    before = counted(server)
    first = post(server, "/v1/chat/completions", messages=history, max_tokens=20)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prompt = first["usage"]["prompt_tokens"]
    assert counted(server) - before == prompt
    again = post(server, "/v1/chat/completions", messages=history, max_tokens=20)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // PAGE * PAGE
    history += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    before = counted(server)
    second = post(server, "/v1/chat/completions", messages=history, max_tokens=5)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (prompt - 1) // PAGE * PAGE
    assert counted(server) - before == second["usage"]["prompt_tokens"] - cached
    assert server.gauge("atlas_kv_tokens_kept") > 0
    assert f"cached={cached}" in server.log.read_text()


def test_every_face_tells_what_was_found(server: Server) -> None:
    history = [{"role": "user", "content": f"Once upon a time. {LONG}"}]
    message = post(server, "/v1/messages", messages=history, max_tokens=3)["usage"]
    assert (message["cache_read_input_tokens"], message["cache_creation_input_tokens"]) == (0, 0)
    total = message["input_tokens"]
    found = (total - 1) // PAGE * PAGE
    message = post(server, "/v1/messages", messages=history, max_tokens=3)["usage"]
    assert (message["input_tokens"], message["cache_read_input_tokens"]) == (total - found, found)
    response = post(server, "/v1/responses", input=history, max_output_tokens=3)["usage"]
    assert (response["input_tokens"], response["input_tokens_details"]["cached_tokens"]) == (total, found)


def test_answers_to_one_prompt_share_it(server: Server) -> None:
    before = counted(server)
    usage = post(server, "/v1/completions", prompt=f"Four of them: {LONG}", n=4, temperature=1, max_tokens=3)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    prompt = usage["prompt_tokens"]
    assert counted(server) - before == prompt + 3 * (prompt - (prompt - 1) // PAGE * PAGE)


def test_another_salt_finds_nothing(server: Server) -> None:
    def cached(**more: Any) -> int:
        usage = post(server, "/v1/completions", prompt=f"A secret: {LONG}", max_tokens=1, **more)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert cached() == cached(cache_salt="a") > 0


def test_it_can_be_turned_off(tmp_path_factory: pytest.TempPathFactory) -> None:
    running = Server(tmp_path_factory.mktemp("serve") / "log", "--no-prefix-cache")
    try:
        for _ in range(2):
            usage = running.complete(prompt=LONG, max_tokens=1)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert running.gauge("atlas_kv_tokens_kept") == 0
    finally:
        assert running.stop() == 0


def events(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={"temperature": 0, "stream": True, **body}) as answer:
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


def test_streams_tell_it_too(server: Server) -> None:
    history = [{"role": "user", "content": f"In pieces. {LONG}"}]
    total = post(server, "/v1/chat/completions", messages=history, max_tokens=3)["usage"]["prompt_tokens"]
    found = (total - 1) // PAGE * PAGE
    chat = events(
        server, "/v1/chat/completions", messages=history, max_tokens=3, stream_options={"include_usage": True}
    )
    assert chat[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == found
    start = events(server, "/v1/messages", messages=history, max_tokens=3)[0]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (total - found, found)
    response = events(server, "/v1/responses", input=history, max_output_tokens=3)[-1]["response"]["usage"]
    assert response["input_tokens_details"]["cached_tokens"] == found
