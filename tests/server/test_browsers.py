"""Web pages and servers that ask for no key."""

import pytest

PAGE = "https://page.example"


def status(server, **headers):
    return server.http.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8888", "127.0.0.1:1", "[::1]:8888", "192.168.1.5", "app.localhost:80"]
)
def test_hosts_that_nobody_else_can_own(serve, host):
    assert status(serve(), host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8888", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "0x7f.1"]
)
def test_a_name_that_may_point_anywhere(serve, host):
    server = serve()
    answer = server.http.post("/tokenize", json={"prompt": "a"}, headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert server.http.get("/health", headers={"host": host}).status_code == 200


def test_names_are_fine_where_others_may_call_and_where_keys_are_asked_for(serve):
    assert status(serve(loopback=False), host="atlas.example") == 200
    assert status(serve(api_keys=("k",)), host="atlas.example", **{"x-api-key": "k"}) == 200


def test_pages_of_other_origins(serve):
    server = serve()
    answer = server.http.post(
        "/tokenize", content=b'{"prompt": "a"}', headers={"origin": PAGE, "content-type": "text/plain"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert status(server, origin="null") == 403
    assert status(server, origin=server.url) == 200
    assert status(serve(loopback=False), origin=PAGE) == 403


def test_pages_that_may(serve):
    assert status(serve(cors_origins=(PAGE,)), origin=PAGE) == 200
    assert status(serve(cors_origins=(PAGE,)), origin="https://other.example") == 403
    assert status(serve(cors_origins=("*",)), origin="https://other.example") == 200
    assert status(serve(api_keys=("k",)), origin=PAGE, **{"x-api-key": "k"}) == 200
