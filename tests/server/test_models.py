"""The list of models as Anthropic's clients read it; test_health.py has OpenAI's."""

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.server.models import page
from atlas_core.vocab.errors import RequestError

NAMES = ("tiny", "org/tiny", "alias")
VERSION = {"anthropic-version": "2026-10-21"}


@pytest.fixture
def server(serve, kit):
    return serve(served=kit.model(names=NAMES), api_keys=("k",))


def test_the_sdk_reads_all_pages(server):
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        assert [model.id for model in client.models.list(limit=2)] == [*NAMES]
        first = client.models.list(limit=2)
        assert (first.has_more, first.first_id, first.last_id) == (True, "tiny", "org/tiny")
        model = client.models.retrieve("org/tiny")
        assert (model.type, model.display_name, model.created_at.year, model.max_tokens) == (
            "model",
            "org/tiny",
            2023,
            512,
        )
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("other")
        assert (caught.value.type, caught.value.error_code) == ("not_found_error", "model_not_found")
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.type == "authentication_error"


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("limit=1001", "limit"), ("after_id=x", "after_id"), ("before_id=x", "before_id"),
     ("before_id=tiny&after_id=tiny", "before_id")],
)  # fmt: skip
def test_pages_that_cannot_be(server, query, field):
    found = server.http.get(f"/v1/models?{query}", headers={**VERSION, "x-api-key": "k"})
    assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")
    assert found.json()["error"]["message"].startswith(field)


def test_the_header_decides(server):
    for path in ("/v1/models", "/v1/models/tiny", "/v1/models/other"):
        plain = server.http.get(path, headers={"x-api-key": "k"})
        asked = server.http.get(path, headers={**VERSION, "x-api-key": "k"})
        assert plain.status_code == asked.status_code
        assert plain.json().keys() != asked.json().keys()
        assert ("request-id" in plain.headers, "request-id" in asked.headers) == (False, True)


@given(st.lists(st.text(max_size=3), unique=True, max_size=8), st.integers(1, 4))
def test_pages_joined_are_the_list(names, limit):
    for cursor, forward in (("after_id", True), ("before_id", False)):
        found, query = [], {"limit": str(limit)}
        if not forward:
            if not names:
                continue
            found, query = [names[-1]], {"limit": str(limit), "before_id": names[-1]}
        while True:
            part, more = page(tuple(names), query)
            assert len(part) == limit or not more
            found = [*found, *part] if forward else [*part, *found]
            if not more:
                break
            query[cursor] = part[-1] if forward else part[0]
        assert found == names


def test_a_page_names_what_is_wrong():
    with pytest.raises(RequestError) as caught:
        page(NAMES, {"after_id": "nobody"})
    assert caught.value.field == "after_id"


def test_codex_finds_a_list_that_it_can_read(server):
    key = {"x-api-key": "k"}
    usual = server.http.get("/v1/models", headers=key).json()
    assert (usual.keys(), len(usual["data"])) == ({"object", "data"}, 3)
    assert server.http.get("/v1/models?client_version=0.171.0", headers=key).json() == {**usual, "models": []}
