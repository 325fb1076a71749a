"""Clients that send too much before their request, or too slowly, or read nothing."""

import contextlib
import json
import socket
import time

import pytest

from atlas_core.server.protocol import PatientProtocol
from atlas_core.vocab.messages import Delta


def connect(server):
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10)


def answer(connection):
    """The whole of one answer, whose body is an object."""
    said = b""
    while not said.rstrip().endswith(b"}"):
        said += connection.recv(65536)
    return said


def to_the_end(connection):
    """What arrives until the other side closes, or resets what it would not read."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            said += data
    return said


def drip(connection, parts, pause=0.03, most=100):
    """Send ``parts`` again and again until the other side says something or closes; all that it says."""
    try:
        for number in range(most):
            connection.sendall(parts[number] if number < len(parts) else parts[-1])
            time.sleep(pause)
            connection.setblocking(False)
            try:
                said = connection.recv(65536)
            except BlockingIOError:
                continue
            finally:
                connection.settimeout(10)
            return said and said + to_the_end(connection)  # head and body may arrive apart
    except (BrokenPipeError, ConnectionResetError):
        return b""
    raise AssertionError("the connection was not closed")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(PatientProtocol, "header_timeout", 0.3)


@pytest.mark.usefixtures("impatient")
def test_a_dripping_head_is_cut_off(serve):
    server = serve()
    started = time.monotonic()
    with connect(server) as one:
        said = drip(one, [b"GET /version HTTP/1.1\r\nhost: localhost\r\n", b"x-a: b\r\n"])
    assert said.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - started < 2
    assert server.http.get("/version").status_code == 200


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_says_nothing_is_closed(serve):
    with connect(serve()) as one:
        assert one.recv(10) == b""


@pytest.mark.usefixtures("impatient")
def test_the_second_request_of_a_connection_has_a_limit_too(serve):
    with connect(serve()) as one:
        one.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert answer(one).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.5)  # between requests there is another, longer limit
        one.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert answer(one).startswith(b"HTTP/1.1 200 ")
        assert drip(one, [b"GET /ver", b"s"]).startswith(b"HTTP/1.1 408 ")


@pytest.mark.usefixtures("impatient")
def test_a_body_that_nobody_reads_is_cut_off(serve):
    with connect(serve()) as one:
        head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
        one.sendall(head)
        assert answer(one).startswith(b"HTTP/1.1 404 ")
        assert drip(one, [b"x"]) == b""


@pytest.mark.usefixtures("impatient")
def test_a_long_answer_is_not_cut_off(serve, kit):
    server = serve(kit.engine(delay=0.05))
    response = server.chat(max_tokens=20)
    assert response.status_code == 200
    assert response.elapsed.total_seconds() > 0.6


def test_a_dripping_body_is_cut_off(serve):
    server = serve(body_timeout=0.3)
    with connect(server) as one:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
        said = drip(one, [head, b"x"])
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in said
    assert b"connection: close" in said
    assert server.chat().status_code == 200


def test_a_large_body_may_take_longer(serve):
    server = serve(body_timeout=0.2)

    def chunks():
        yield b'{"messages":[{"role":"user","content":"'
        for _ in range(20):
            time.sleep(0.03)
            yield b"x" * 20_000
        yield b'"}]}'

    response = server.http.post("/v1/chat/completions", content=chunks())
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_client_that_reads_nothing_is_cut_off(serve, kit, monkeypatch):
    monkeypatch.setattr(PatientProtocol, "write_timeout", 0.3)

    def much(request):
        return [Delta(request.id, (97,), "x" * 2**16) for _ in range(2000)]

    server = serve(kit.engine(answer=much))
    body = b'{"prompt":"a","stream":true,"max_tokens":400}'
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        one.sendall(head.encode() + body)
        kit.until(lambda: server.engine.aborted, 20)
    assert server.engine.running == 0


@pytest.mark.parametrize(("count", "size", "status"), [(90, 10, 200), (120, 10, 431), (4, 9000, 431)])
def test_headers_have_limits(serve, count, size, status):
    headers = {f"x-{number}": "v" * size for number in range(count)}
    response = serve().http.get("/version", headers=headers)
    assert response.status_code == status
    if status == 431:
        assert response.json()["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize(("version", "chunked"), [("1.1", True), ("1.0", False)])
def test_streams_are_framed_as_the_version_wants_it(serve, kit, version, chunked):
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 100}).encode()
    with connect(serve()) as one:
        head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        one.sendall(head.encode() + body)
        said = to_the_end(one)
    headers, _, rest = said.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in headers.lower()) is chunked
    plain = b""
    while chunked and rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        plain, rest = plain + rest[:length], rest[length:]
        assert rest.startswith(b"\r\n")
        rest = rest[2:]
    events = [line[6:] for line in (plain or rest).split(b"\n\n") if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    assert "".join(choice["text"] for event in events for choice in json.loads(event)["choices"]) == kit.answer


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 80_000,
        b"GET /caf\xc3\xa9 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_like_everything_else(serve, said):
    server = serve()
    with connect(server) as one:
        one.sendall(said)
        head, _, body = answer(one).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert one.recv(10) == b""
    assert server.http.get("/version").status_code == 200
