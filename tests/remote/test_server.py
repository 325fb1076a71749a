"""The client against a scripted server on a real socket."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from atlas_core.remote.server import RemoteServer
from atlas_core.vocab.errors import EngineError, RequestError, UsageError


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Authorization"), None))
        self._answer()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        self._answer()

    def _answer(self):
        status, payload = self.server.script
        self.send_response(status)
        if isinstance(payload, list):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in payload:
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)


@pytest.fixture
def served():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client(served, **options):
    return RemoteServer(f"127.0.0.1:{served.server_address[1]}", **options)


def test_models_with_a_key(served):
    served.script = 200, b'{"data": [{"id": "a"}, {"id": "b"}]}'
    assert client(served, api_key="secret").models() == ["a", "b"]
    assert served.seen == [("/v1/models", "Bearer secret", None)]


def test_a_stream_is_read_whatever_its_chunks(served):
    served.script = 200, [b'data: {"n": 1}\n', b'\ndata: {"n"', b": 2}\n\n: ping\n\ndata: [DONE]\n\n"]
    assert list(client(served).stream("/completions", {"prompt": "x"})) == [{"n": 1}, {"n": 2}]
    assert served.seen == [("/v1/completions", None, {"prompt": "x", "stream": True})]


def test_a_stream_without_an_end_was_broken_off(served):
    served.script = 200, [b'data: {"n": 1}\n\n']
    stream = client(served).stream("/completions", {})
    assert next(stream) == {"n": 1}
    with pytest.raises(EngineError, match="broke off"):
        next(stream)


def test_an_error_inside_a_stream(served):
    served.script = 200, [b'data: {"error": {"message": "it burns"}}\n\n']
    with pytest.raises(EngineError, match="failed while it answered") as caught:
        list(client(served).stream("/completions", {}))
    assert caught.value.why == "it burns"


@pytest.mark.parametrize(
    ("status", "kind", "attribute"),
    [
        (400, RequestError, "invalid"), (401, RequestError, "unauthorized"), (404, RequestError, "not_found"),
        (413, RequestError, "too_large"), (429, RequestError, "overloaded"), (500, EngineError, None),
        (503, EngineError, None),
    ],
)  # fmt: skip
def test_refusals_carry_the_words_of_the_server(served, status, kind, attribute):
    served.script = status, b'{"error": {"message": "because of this"}}'
    with pytest.raises(kind, match=f"answered {status}: because of this") as caught:
        client(served).models()
    assert getattr(caught.value, "kind", None) == attribute


def test_a_refusal_that_is_no_json_is_shown_as_it_is(served):
    served.script = 502, b"<html>\n bad   gateway</html>"
    with pytest.raises(EngineError, match="<html> bad gateway</html>"):
        client(served).models()


@pytest.mark.parametrize("payload", [b"[]", b"hello", b'{"data": []}', b'{"data": [{"id": 3}]}', b'{"data": 7}'])
def test_what_is_no_such_server(served, payload):
    served.script = 200, payload
    with pytest.raises(EngineError, match="no OpenAI-compatible server"):
        client(served).models()


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineError, match="cannot be reached") as caught:
        RemoteServer(f"http://127.0.0.1:{port}").models()
    assert "atlas serve" in caught.value.cure


@pytest.mark.parametrize("url", ["ftp://x", "", "http://", "http://h:port", "http://h:99999", "http://h?a=1"])
def test_what_is_no_url(url):
    with pytest.raises(UsageError, match="not the URL"):
        RemoteServer(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("localhost:8888", "http://localhost:8888/v1"), ("https://h/openai/v1/", "https://h/openai/v1"),
        ("http://[::1]:9/", "http://[::1]:9/v1"),
    ],
)  # fmt: skip
def test_urls_are_completed(url, shown):
    assert RemoteServer(url).url == shown
