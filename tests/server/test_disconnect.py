import socket
import time

import httpx
import pytest


def raw(server, body, path="/v1/chat/completions"):
    """Send a request and give the open socket: nothing of it is read, so that closing it is all that the server sees."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    request = httpx.Request("POST", server.url + path, json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    return connection


def body(**more):
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4096, "ignore_eos": True, **more}


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_client_that_leaves_stops_the_work(serve, kit, phase, stream, choices):
    server = serve(kit.engine(delay=0.01, prefill=60 if phase == "prefill" else 0, context=100_000))
    connection = raw(server, body(stream=stream, n=choices))
    kit.until(lambda: server.engine.running == choices)
    if stream and phase == "decode":
        got = b""
        while got.count(b'"content":"') < 4:
            got += connection.recv(4096)
    start = time.monotonic()
    connection.close()
    kit.until(lambda: len(server.engine.aborted) == choices, seconds=1)
    assert time.monotonic() - start < 1
    assert server.engine.running == server.engine.waiting == 0
    kit.until(lambda: "atlas_sequences_inside 0.0" in server.http.get("/metrics").text, seconds=1)
    server.engine.prefill = 0
    assert server.chat(max_tokens=3).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue(serve, kit, stream):
    server = serve(kit.engine(slots=1, delay=0.01, context=100_000))
    first = raw(server, body(stream=True))
    kit.until(lambda: server.engine.running == 1)
    second = raw(server, body(stream=stream))
    kit.until(lambda: server.engine.waiting == 1)
    second.close()
    kit.until(lambda: server.engine.aborted == [server.engine.requests[1].id], seconds=1)
    assert (server.engine.running, server.engine.waiting) == (1, 0)
    first.close()
    kit.until(lambda: server.engine.running == 0, seconds=1)


def test_a_client_that_leaves_while_it_sends(serve, kit):
    server = serve()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
    kit.until(lambda: 'endpoint="/v1/chat/completions",status="499"} 1.0' in server.http.get("/metrics").text)
    assert server.chat().status_code == 200


def test_pings_while_nothing_comes(serve, kit):
    server = serve(kit.engine(prefill=0.5), ping_interval=0.1)
    text = server.chat(stream=True).text
    assert text.startswith(": ping\n\n: ping\n\n")
    assert kit.events(text)[-1] == "[DONE]"
    assert ": ping" not in serve().chat(stream=True).text
