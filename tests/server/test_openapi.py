"""The API document. That it tells the truth is checked by every test of the server: see documented.py."""

import json
import re
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from atlas_core import __version__


def test_every_route_is_in_the_document(serve):
    server = serve()
    found = server.http.get("/openapi.json").json()
    assert (found["openapi"], found["info"]["version"]) == ("3.1.0", __version__)
    routes = {(re.sub(r":\w+}", "}", each.path), each.method.lower()) for each in server.app.table.operations}
    assert {(path, method) for path, methods in found["paths"].items() for method in methods} == routes
    assert {route.path for route in server.app.asgi.routes} == {each.path for each in server.app.table.operations}


def test_the_document_is_openapi(serve):
    found = serve().http.get("/openapi.json").json()
    assert list(OpenAPIV31SpecValidator(found).iter_errors()) == []
    found["paths"] = {"/version": found["paths"]["/version"]}
    found["paths"]["/version"]["get"]["responses"]["200"].pop("description")
    assert list(OpenAPIV31SpecValidator(found).iter_errors()) != []


def test_every_body_has_an_example_that_is_answered(serve):
    server = serve()
    conversation = server.http.post("/v1/conversations").json()["id"]
    for operation in server.app.table.operations:
        if operation.body is None or operation.path == "/v1/embeddings":
            assert operation.body or operation.example is None
            continue
        path = operation.path.replace("{id}", conversation)
        answer = server.http.request(operation.method, path, json=operation.example)
        assert answer.status_code == operation.status, (path, answer.text)
    content = server.http.get("/openapi.json").json()["paths"]["/tokenize"]["post"]["requestBody"]["content"]
    assert content["application/json"]["example"] == {"prompt": "The sky is"}


def test_every_path_is_on_the_page(serve):
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    paths = [re.sub(r":\w+}", "}", each.path) for each in serve().app.table.operations]
    assert [path for path in paths if path not in page] == []


def test_references_lead_somewhere(serve):
    text = serve().http.get("/openapi.json").text
    components = json.loads(text)["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names <= components.keys()
    assert {"ChatRequest", "ChatCompletion", "ChatCompletionChunk", "ErrorBody"} <= names


def test_operations_have_names_of_their_own(serve):
    paths = serve().http.get("/openapi.json").json()["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    assert "post_v1_chat_completions" in names


def test_keys_are_asked_for_as_the_server_asks(serve):
    keys = {"authorization": "Bearer k"}
    closed = serve(api_keys=("k",)).http.get("/openapi.json", headers=keys).json()["paths"]
    free = serve().http.get("/openapi.json").json()["paths"]
    schemes = [{"bearer": []}, {"x-api-key": []}]
    assert closed["/v1/chat/completions"]["post"]["security"] == schemes
    assert free["/v1/chat/completions"]["post"]["security"] == [{}, *schemes]
    assert closed["/health"]["get"]["security"] == []
    assert "401" in closed["/metrics"]["get"]["responses"]
    assert "401" not in closed["/health"]["get"]["responses"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2}])
def test_events_of_streams(serve, kit, fields):
    server = serve()
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chat = kit.events(server.chat(**usage, **fields).text)[:-1]
    assert len(chat) > 2
    for payload in chat:
        server.documented.event("/v1/chat/completions", json.loads(payload))
    legacy = fields | ({"logprobs": 2} if fields else {})
    legacy.pop("top_logprobs", None)
    plain = kit.events(server.complete(**usage, **legacy).text)[:-1]
    assert len(plain) > 2
    for payload in plain:
        server.documented.event("/v1/completions", json.loads(payload))


def test_what_is_not_documented_is_noticed(serve, monkeypatch):
    server = serve()
    monkeypatch.delitem(server.documented._api["paths"]["/version"]["get"]["responses"], "200")
    with pytest.raises(AssertionError, match="/version"):
        server.http.get("/version")
