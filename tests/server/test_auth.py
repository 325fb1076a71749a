import json
import logging

import pytest

KEYS = ("first-key", "schlüssel")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer first-key"}, 200),
        ({"authorization": "bearer  first-key"}, 200),
        ({"authorization": "Bearer schlüssel".encode()}, 401),
        ({"x-api-key": "first-key"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "first-key"}, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer first-ke"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_keys(serve, headers, status):
    response = serve(api_keys=KEYS).http.get("/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in response.headers


def test_every_route_but_probes_asks_for_a_key(serve):
    server = serve(api_keys=KEYS)
    seen = set()
    for route in server.app.table.routes:
        path = route.path.replace("{id:path}", "tiny")
        for method in route.methods:
            response = server.http.request(method, path)
            seen.add(path)
            assert (response.status_code == 401) == (
                path not in ("/health", "/ready", "/health/ready", "/ping", "/live", "/health/live")
            ), (
                method,
                path,
            )
    assert {"/v1/chat/completions", "/metrics", "/tokenize", "/health", "/live"} <= seen
    for path in ("/", "/docs", "/openapi.json", "/v1/models/", "/health/"):
        assert server.http.get(path).status_code == 401
    assert server.engine.requests == []


def test_without_keys_everything_is_open(serve):
    server = serve()
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.get("/metrics", headers={"authorization": "Bearer whatever"}).status_code == 200


def test_metrics_may_be_open(serve):
    server = serve(api_keys=KEYS, public_metrics=True)
    assert server.http.get("/metrics").status_code == 200
    assert server.http.get("/v1/models").status_code == 401


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("# people\nann: secret-of-ann\n\nsecret-without-name\n")
    return path


def models(server, key):
    return server.http.get("/v1/models", headers={"x-api-key": key}).status_code


def test_keys_of_a_file_join_those_that_were_given(serve, key_file):
    server = serve(api_keys=("given",), api_keys_file=key_file)
    assert [models(server, key) for key in ("given", "secret-of-ann", "secret-without-name", "ann", "people")] == [
        200,
        200,
        200,
        401,
        401,
    ]


def test_a_file_that_changes_is_read_again(serve, kit, key_file):
    server = serve(api_keys_file=key_file)
    assert models(server, "secret-of-ann") == 200
    replaced = key_file.with_name("new")
    replaced.touch(mode=0o600)
    replaced.write_text("bob:secret-of-bob\n")
    replaced.replace(key_file)
    kit.until(lambda: models(server, "secret-of-bob") == 200)
    assert models(server, "secret-of-ann") == 401


@pytest.mark.parametrize("text", ["", "bob: two words\n", None])
def test_a_file_that_became_unusable_leaves_the_old_keys(serve, key_file, text, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("atlas"), "propagate", True)
    server = serve(api_keys_file=key_file)
    if text is None:
        key_file.unlink()
    else:
        key_file.write_text(text)
    server.app.keys.reload()
    assert models(server, "secret-of-ann") == 200
    assert "the old ones stay" in caplog.text
    assert "two words" not in caplog.text


@pytest.mark.parametrize("as_json", [False, True])
def test_the_log_names_the_key_and_tells_no_secret(serve, kit, key_file, caplog, monkeypatch, as_json):
    monkeypatch.setattr(logging.getLogger("atlas"), "propagate", True)
    caplog.set_level("DEBUG")
    server = serve(api_keys=("given-secret",), api_keys_file=key_file, json_logs=as_json)
    for key in ("secret-of-ann", "secret-without-name", "given-secret", "wrong-secret"):
        server.http.post("/v1/chat/completions", content=b"{}", headers={"authorization": f"Bearer {key}"})
        models(server, key)

    def lines():
        return [record.getMessage() for record in caplog.records if record.name == "atlas.request"]

    kit.until(lambda: len([line for line in lines() if "/v1/" in line]) == 8)
    assert "secret" not in "".join(record.getMessage() for record in caplog.records if record.name.startswith("atlas"))
    named = [line for line in lines() if "/v1/chat" in line]
    assert ('"key":"ann"' if as_json else " key=ann ") in named[0]
    if as_json:
        names = [json.loads(line)["key"] for line in named]
        assert [name.startswith("key-") for name in names] == [False, True, True, False]
        assert names[3] == ""
