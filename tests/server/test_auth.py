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


def test_every_route_but_two_asks_for_a_key(serve):
    server = serve(api_keys=KEYS)
    seen = set()
    for route in server.app.table.routes:
        path = route.path.replace("{id:path}", "tiny")
        for method in route.methods:
            response = server.http.request(method, path)
            seen.add(path)
            assert (response.status_code == 401) == (path not in ("/health", "/live")), (method, path)
    assert {"/v1/chat/completions", "/metrics", "/tokenize", "/health", "/live"} <= seen
    for path in ("/", "/docs", "/openapi.json", "/v1/models/", "/health/"):
        assert server.http.get(path).status_code == 401
    assert server.engine.requests == []


def test_without_keys_everything_is_open(serve):
    server = serve()
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.get("/metrics", headers={"authorization": "Bearer whatever"}).status_code == 200
