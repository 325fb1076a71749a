"""Which requests may use what was computed for one another."""

import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}


def space(server, path="/v1/chat/completions", key=None, **more):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = server.http.post(path, json=BODIES[path] | more, headers=headers)
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].space


@pytest.fixture(scope="module")
def open_server(serve_module):
    return serve_module()


@pytest.mark.parametrize("path", BODIES)
def test_salts_part_requests_on_every_face(open_server, path):
    assert space(open_server, path) == ""
    assert space(open_server, path, cache_salt="a") == space(open_server, cache_salt="a") != ""
    assert space(open_server, path, cache_salt="a") != space(open_server, path, cache_salt="b")


def test_a_key_that_nobody_asks_for_parts_nothing(open_server):
    assert space(open_server, key="dummy") == ""


def test_keys_part_clients(serve):
    server = serve(api_keys=("one", "two"))
    assert space(server, key="one") == space(server, "/v1/messages", key="one")
    found = [space(server, key=key, **more) for key in ("one", "two") for more in ({}, {"cache_salt": "a"})]
    assert len({"", *found}) == 5


@pytest.mark.parametrize("salt", ["", 5, "x" * 1025])
@pytest.mark.parametrize("path", BODIES)
def test_a_salt_is_a_text(open_server, path, salt):
    answer = open_server.http.post(path, json=BODIES[path] | {"cache_salt": salt})
    assert answer.status_code == 400
    assert "cache_salt" in answer.text
