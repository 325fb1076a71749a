import logging
import re
import time

import pytest

from atlas_core.server.errors import TABLE, answer_to, error_headers, error_object
from atlas_core.vocab.errors import AtlasError, DeviceError, EngineError, RequestError
from atlas_core.vocab.messages import Delta

BAD = [
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],}', b'{"model":"m"', b"", b"[]", b'"x"', b'{"a":"\xff"}',
    rb'{"messages":[{"role":"user","content":"half: \ud83c"}]}', b"[" * 10000 + b"]" * 10000, b'{"n":1,"n":2}',
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bad_bodies_get_400_and_harm_nobody(serve, path):
    server = serve()
    for body in BAD:
        response = server.http.post(path, content=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert "Traceback" not in response.text
    assert server.chat().status_code == 200
    assert len(server.engine.requests) == 1


def test_a_body_over_the_limit(serve):
    server = serve(max_body=10_000)
    response = server.http.post("/v1/chat/completions", content=b"x" * 5_000_000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

    def chunks():
        for _ in range(100):
            yield b"x" * 1000

    assert server.http.post("/v1/chat/completions", content=chunks()).status_code == 413
    assert (
        server.http.post("/v1/chat/completions", content=b"{}", headers={"content-encoding": "gzip"}).status_code == 400
    )
    assert server.chat().status_code == 200


def test_paths_and_methods_that_do_not_exist(serve):
    server = serve()
    response = server.http.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_path")
    response = server.http.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/completion", "did you mean /v1/completions?"),
        ("/", "GET /openapi.json lists what there is"),
        ("/admin", "GET /openapi.json lists what there is"),
    ],
)
def test_a_path_that_is_nearly_one_is_told_which(serve, path, cure):
    response = serve().http.post(path, json={})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == f"there is no {path} here ({cure})"


def test_a_defect_gives_500_with_a_request_id_and_no_trace(serve, kit, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("atlas"), "propagate", True)

    def broken(request):
        raise ZeroDivisionError("secret")

    server = serve(kit.engine(answer=broken))
    response = server.chat()
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in response.text
    failed = next(record for record in caplog.records if record.exc_info)
    assert response.headers["x-request-id"] in failed.getMessage()
    assert failed.exc_info[0] is ZeroDivisionError


def test_the_engines_refusal_keeps_its_field_and_becomes_a_status_for_streams_too(serve, kit):
    def refuse(request):
        raise RequestError("no", "because", "do", field="logit_bias", code="pool_too_small")

    server = serve(kit.engine(answer=refuse))
    for stream in (False, True):
        response = server.chat(stream=stream)
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": "no: because (do)", "type": "invalid_request_error", "param": "logit_bias", "code": "pool_too_small"
        }  # fmt: skip


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("way", ["raise", "abort", "silence"])
def test_a_stream_that_breaks_says_so_and_ends(serve, kit, way, choices):
    def breaking(request):
        yield from kit.deltas(request)[:6]
        if way == "raise":
            raise EngineError("the engine died", "killed", "", state="gone")
        if way == "abort":
            yield Delta(request.id, finish="abort")

    server = serve(kit.engine(answer=breaking))
    payloads = kit.events(server.chat(stream=True, n=choices).text)
    assert payloads[-1].startswith('{"error":{"message":')
    assert not any('"finish_reason":"' in payload for payload in payloads)
    response = server.chat(n=choices)
    assert response.status_code == (503 if way == "raise" else 500)
    assert server.http.get("/health").status_code == 200


def test_request_ids(serve):
    server = serve()
    assert server.http.get("/version", headers={"x-request-id": "my-id.1:a_B"}).headers["x-request-id"] == "my-id.1:a_B"
    for bad in ("two words", "x" * 129, "a=b"):
        assert re.fullmatch(
            "req_[0-9a-f]{32}", server.http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        )
    assert server.chat().headers["x-request-id"] != server.chat().headers["x-request-id"]


def test_every_row_makes_a_whole_answer():
    assert {row.status for row in TABLE.values()} == {400, 401, 403, 404, 405, 408, 413, 429, 431, 500, 501, 503}
    for name, row in TABLE.items():
        kind, _, word = name.partition(".")
        error = {
            "RequestError": lambda w=word: RequestError("w", kind=w),
            "EngineError": lambda w=word: EngineError("w", state=w),
        }.get(kind, lambda: AtlasError("w"))()
        assert answer_to(error) == row
        assert error_object(error)["error"]["type"] == row.type
        # SDKs retry every 429 and 5xx: each says when, or that it is of no use, but for defects.
        if row.status in (429, 503):
            assert {"retry-after", "x-should-retry"} & error_headers(row).keys()


def test_the_errors_own_delay_and_code_win():
    answer = answer_to(RequestError("busy", kind="overloaded", retry_after=2.2, code="queue_full"))
    assert (answer.status, answer.code, error_headers(answer)["retry-after"]) == (429, "queue_full", "3")
    assert answer_to(DeviceError("lost")).status == 500


def test_answers_tell_how_long_they_took(serve, kit):
    server = serve(kit.engine(delay=0.05))
    whole, started = server.chat(max_tokens=4), time.perf_counter()
    stream = server.chat(max_tokens=4, stream=True)
    assert int(whole.headers["openai-processing-ms"]) >= 200
    assert int(stream.headers["openai-processing-ms"]) <= 1000 * (time.perf_counter() - started)
    assert int(server.http.get("/v1/models/none").headers["openai-processing-ms"]) >= 0
    assert "openai-processing-ms" not in server.http.get("/health").headers
