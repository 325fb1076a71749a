"""Deltas that go from the engine's reader to the connection without a task being woken: nothing may be different about them."""

import json
import socket
import time

import pytest

from atlas_core.server.chat import ChatChunks
from atlas_core.vocab.messages import Delta

PIECES = 1000
LONG = "x" * 8192
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY)


def texts(stream):
    return [json.loads(event)["choices"][0]["delta"].get("content") for event in stream if event != "[DONE]"]


def many(request):
    """Pieces that say which they are, far more of them together than any buffer holds."""
    last = {"prompt_tokens": 3, "completion_tokens": PIECES}
    return [
        *(Delta(request.id, (7,), f"{n} {LONG}", prompt_tokens=3, completion_tokens=n) for n in range(1, PIECES)),
        Delta(request.id, (7,), "end", finish="stop", **last),
    ]


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"logprobs": True}])
def test_it_is_the_way_of_plain_streams(serve, kit, body):
    engine = kit.engine()
    server = serve(engine)
    found = kit.events(server.chat(stream=True, **body).text)
    whole = server.chat(**body).json()["choices"]
    for index in range(body.get("n", 1)):
        mine = [json.loads(event)["choices"][0] for event in found if event != "[DONE]"]
        said = "".join(one["delta"].get("content") or "" for one in mine if one["index"] == index)
        assert said == whole[index]["message"]["content"]
    # All but the first and the last; where choices are merged, none.
    assert engine.taken == (0 if "n" in body else len(kit.deltas(engine.requests[0])) - 2)


def test_tokens_are_counted_once_whichever_way_they_go(serve, kit):
    engine = kit.engine()
    server = serve(engine)
    response = server.chat(stream=True, stream_options={"include_usage": True})
    usage = json.loads(kit.events(response.text)[-2])["usage"]
    assert engine.taken
    metrics = server.http.get("/metrics").text
    assert f"atlas_generation_tokens_total {float(usage['completion_tokens'])}" in metrics
    assert f"atlas_inter_token_latency_seconds_count {float(usage['completion_tokens'] - 1)}" in metrics


def test_a_client_that_pauses_loses_nothing_and_holds_up_nobody(serve, kit):
    slow = kit.engine(answer=lambda request: many(request) if len(slow.requests) == 1 else kit.deltas(request))
    server = serve(slow)
    with socket.socket() as one:
        one.settimeout(10)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        one.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        one.sendall(HEAD + BODY)
        kit.until(lambda: slow.taken > 0)
        stuck, until = -1, time.monotonic() + 5
        while stuck != slow.taken and time.monotonic() < until:
            stuck = slow.taken
            time.sleep(0.1)
        assert 0 < stuck < PIECES - 2  # the connection is full, and the engine's reader was told so
        assert "".join(filter(None, texts(kit.events(server.chat(stream=True).text)))) == kit.answer
        said = b""
        while not said.endswith(b"0\r\n\r\n"):
            said += one.recv(1 << 16)
    body = said.partition(b"\r\n\r\n")[2]
    plain = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        plain += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    found = texts(kit.events(plain.decode()))
    assert found[:-1] == ["", *(f"{n} {LONG}" for n in range(1, PIECES)), "end"]


def test_a_writer_that_fails_ends_its_stream_with_an_error(serve, kit, monkeypatch):
    chunk = ChatChunks.chunk

    def broken(self, index, delta):
        if delta.completion_tokens == 5:
            raise ValueError("a fault of ours")
        return chunk(self, index, delta)

    monkeypatch.setattr(ChatChunks, "chunk", broken)
    engine = kit.engine()
    server = serve(engine)
    last = kit.events(server.chat(stream=True).text)[-1]
    assert json.loads(last)["error"]["type"] == "server_error"
    kit.until(lambda: engine.aborted == [engine.requests[0].id])
