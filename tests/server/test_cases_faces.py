"""Inputs that broke other servers, sent to each of the three faces: limits, bad bodies, clients that leave, overload (22 to 29)."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

USER = {"role": "user", "content": "hi"}


class Face:
    """One of the faces: where it is, how it is asked, and what its answers and errors say."""

    def __init__(self, path, messages, limit, error):
        self.path, self.messages, self.limit, self._error = path, messages, limit, error

    def __repr__(self):
        return self.path

    def body(self, messages=(USER,), tokens=400, **more):
        return {self.messages: list(messages), self.limit: tokens, **more}

    def refusal(self, response):
        """(type, code or None) of an error, after checking its shape."""
        body = response.json()
        assert set(body) == self._error
        assert "Traceback" not in response.text
        if "request_id" in self._error:
            assert body["type"] == "error"
            assert body["request_id"] == response.headers["request-id"]
            return body["error"]["type"], body["error"].get("details", {}).get("error_code")
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]["type"], body["error"]["code"]

    def tokens(self, response):
        usage = response.json()["usage"]
        return usage.get("completion_tokens", usage.get("output_tokens"))

    def reason(self, response):
        body = response.json()
        if "choices" in body:
            return body["choices"][0]["finish_reason"]
        return body.get("stop_reason") or (body.get("incomplete_details") or {}).get("reason")


CHAT = Face("/v1/chat/completions", "messages", "max_tokens", {"error"})
MESSAGES = Face("/v1/messages", "messages", "max_tokens", {"type", "error", "request_id"})
RESPONSES = Face("/v1/responses", "input", "max_output_tokens", {"error"})
FACES = (CHAT, MESSAGES, RESPONSES)
every_face = pytest.mark.parametrize("face", FACES, ids=repr)


@pytest.fixture(scope="module")
def server(serve_module, kit):
    """A server for whatever needs nothing special; ``say`` sets what its model answers."""
    said = {"text": kit.answer, "chunk": 1}
    engine = kit.engine(lambda request: kit.deltas(request, said["text"], chunk=said["chunk"]))
    running = serve_module(engine, max_body=2**20)
    running.say = said.update
    return running


@pytest.fixture(autouse=True)
def _as_before(request, kit):
    if "server" in request.fixturenames:
        request.getfixturevalue("server").say(text=kit.answer, chunk=1)


def post(server, face, **body):
    return server.http.post(face.path, json=face.body(**body))


# 24


@pytest.mark.parametrize(
    ("text", "cut_at"),
    [("😀", 4), ("ď", 2), ("e\u0301", 3), ("👩‍💻", 11), ("a\ufffdb", 5)],
    ids=["emoji", "d", "accent", "zwj", "real"],
)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_case_24_characters_split_over_tokens(server, kit, text, cut_at, chunk):
    server.say(text=text, chunk=chunk)
    for limit in range(1, cut_at + 2):
        whole = server.chat(max_tokens=limit).json()["choices"][0]["message"]["content"]
        response = server.chat(max_tokens=limit, stream=True)
        response.content.decode("utf-8", errors="strict")
        pieces = [
            json.loads(event)["choices"][0]["delta"].get("content", "") for event in kit.events(response.text)[:-1]
        ]
        assert "".join(pieces) == whole
        expected = text.encode()[:limit].decode("utf-8", errors="ignore")
        assert whole in (expected, expected + "\ufffd")
        if limit > cut_at:
            assert whole == text


# 26


@every_face
@pytest.mark.parametrize("tokens", [0, -1, "5", 1.5, True])
def test_case_26_lengths_that_are_none(server, face, tokens):
    response = post(server, face, tokens=tokens)
    assert response.status_code == 400
    assert face.refusal(response)[0] == "invalid_request_error"
    assert face.limit in response.json()["error"]["message"]


@every_face
def test_case_26_one_token_and_more_than_there_is_room_for(server, face):
    server.say(text="x" * 2000)
    assert face.tokens(post(server, face, tokens=1)) == 1
    response = post(server, face, tokens=5000)
    assert response.status_code == 200
    assert face.tokens(response) == 512 - len(server.engine.requests[-1].prompt)
    assert face.reason(response) in ("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded")


@every_face
def test_case_26_a_prompt_without_room(server, face):
    response = post(server, face, messages=[{"role": "user", "content": "x" * 600}])
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "512" in message or "511" in message
    assert "600" not in message  # the true number is that of the rendered prompt
    assert "6" in message


# 27


def connect(server, path, body):
    request = httpx.Request("POST", server.url + path, json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("face", [MESSAGES, RESPONSES], ids=repr)
def test_case_27_a_client_that_leaves(serve, kit, face, stream):
    server = serve(
        kit.engine(lambda request: kit.deltas(request, "x" * 5000, context=10**5), delay=0.005, context=10**5)
    )
    connection = connect(server, face.path, face.body(tokens=4096, stream=stream))
    kit.until(lambda: server.engine.running == 1)
    if stream:
        got = b""
        while got.count(b"delta") < 8:
            got += connection.recv(4096)
    else:
        time.sleep(0.1)
    connection.close()
    kit.until(lambda: len(server.engine.aborted) == 1, seconds=1)
    assert server.engine.running == server.engine.waiting == 0
    kit.until(lambda: server.app.gate.inside == 0, seconds=1)
    # Also while its prompt is computed, and while it waits in the line.
    server.engine.prefill, server.engine.slots = 60, 1
    first = connect(server, face.path, face.body(stream=stream))
    kit.until(lambda: server.engine.running == 1)
    second = connect(server, face.path, face.body(stream=stream))
    kit.until(lambda: server.engine.waiting == 1)
    second.close()
    kit.until(lambda: server.engine.waiting == 0, seconds=1)
    first.close()
    kit.until(lambda: server.engine.running == 0, seconds=1)


# 28


BROKEN = [
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],}', b'{"model":"m"', b"", b"[]", b'"x"', b'{"a":"\xff"}',
    rb'{"messages":[{"role":"user","content":"half: \ud83c"}],"input":"\ud83c","max_tokens":5}',
    rb'{"messages":[{"role":"user","content":"\udf0a tail"}],"input":"\udf0a","max_tokens":5}',
    b"[" * 10000 + b"]" * 10000, b'{"messages":' + b"[" * 10000 + b"]" * 10000 + b"}",
]  # fmt: skip


@every_face
def test_case_28_broken_bodies(server, face):
    for body in BROKEN:
        started = time.monotonic()
        response = server.http.post(face.path, content=body)
        assert response.status_code == 400, body[:80]
        assert face.refusal(response)[0] == "invalid_request_error"
        assert time.monotonic() - started < 1
        assert server.http.get("/health").status_code == 200


@every_face
def test_case_28_wrong_shapes(server, face):
    shapes = [[], 5, [5], [{"role": "wizard", "content": "x"}], [{"role": "user", "content": 5}]]
    shapes += ["hi"] if face is not RESPONSES else []
    for messages in shapes:
        response = server.http.post(face.path, json={**face.body(), face.messages: messages})
        assert response.status_code == 400, messages
        assert face.refusal(response)[0] == "invalid_request_error"
    assert post(server, face).status_code == 200


@every_face
@pytest.mark.parametrize("arguments", ['{"a":', "not json"])
def test_case_28_replayed_calls_that_are_broken(server, face, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = {
        CHAT: [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "x"}],
        MESSAGES: [
            USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": arguments}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}]},
        ],
        RESPONSES: [
            USER, {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
        ],
    }[face]  # fmt: skip
    response = post(server, face, messages=history)
    assert response.status_code == 400
    assert face.refusal(response)[0] == "invalid_request_error"
    assert "arguments" in response.text or "input" in response.text
    assert post(server, face).status_code == 200


@every_face
def test_case_28_an_empty_turn_of_the_assistant_is_fine(server, face):
    history = [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "go on"}]
    assert post(server, face, messages=history).status_code == 200


@every_face
def test_case_28_bodies_that_are_too_large_or_grow(server, face):
    response = server.http.post(face.path, content=b"x" * 3_000_000)
    assert response.status_code == 413
    face.refusal(response)
    response = server.http.post(face.path, content=b"x", headers={"content-encoding": "gzip"})
    assert (response.status_code, face.refusal(response)[1]) == (400, "unsupported_encoding")
    assert post(server, face).status_code == 200


PICTURES = [
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAATiAAAE4g",
    "data:image/png;base64,%%%",
    "file:///etc/hostname",
    "http://127.0.0.1:1/x.png",
]


@every_face
@pytest.mark.parametrize("url", PICTURES)
def test_case_28_images_are_neither_fetched_nor_decoded(server, face, url):
    data = url.partition("base64,")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data} if data else {"type": "url", "url": url}
    part, field = {
        CHAT: ({"type": "image_url", "image_url": {"url": url}}, "messages[0].content[0]"),
        MESSAGES: ({"type": "image", "source": source}, "messages[0].content[0]"),
        RESPONSES: ({"type": "input_image", "image_url": url, "detail": "auto"}, "input[0].content[0]"),
    }[face]  # fmt: skip
    started = time.monotonic()
    response = post(server, face, messages=[{"role": "user", "content": [part]}])
    assert response.status_code == 400
    face.refusal(response)
    assert field in response.json()["error"]["message"]
    assert time.monotonic() - started < 1


# 29


@every_face
@pytest.mark.parametrize("stream", [False, True])
def test_case_29_a_burst_is_cut_at_the_limit(serve, kit, face, stream):
    server = serve(kit.engine(slots=2, delay=0.01), max_queue=2)
    with ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(lambda _: post(server, face, tokens=20, stream=stream), range(10)))
    assert sorted(response.status_code for response in responses) == [200] * 4 + [429] * 6
    for response in responses:
        if response.status_code == 429:
            assert face.refusal(response)[0] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
            assert int(response.headers["retry-after-ms"]) > 0
            assert response.headers["content-type"] == "application/json"
    assert post(server, face, tokens=2).status_code == 200
