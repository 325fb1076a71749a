import pytest
from msgspec.structs import replace

from atlas_core import __version__
from atlas_core.server.absent import ABSENT, absent
from atlas_core.server.options import ServerOptions
from atlas_core.settings import Settings, read_settings

TURNS = [{"role": "user", "content": "hi"}]


def test_pieces_of_tokens(serve, kit):
    post = serve().http.post
    assert post("/tokenize", json={"prompt": "é", "return_token_strs": True}).json() == {
        "tokens": [kit.bos, 0xC3, 0xA9], "count": 3, "max_model_len": 512, "token_strs": ["<bos>", "\ufffd", "\ufffd"],
    }  # fmt: skip
    pieces = post("/tokenize", json={"content": "aé<eos>", "with_pieces": True}).json()["tokens"]
    assert pieces == [
        {"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}, {"id": kit.eos, "piece": "<eos>"},
    ]  # fmt: skip


def test_each_form_adds_special_tokens_as_its_clients_expect(serve, kit):
    post = serve().http.post

    def first(**body):
        return post("/tokenize", json=body).json()["tokens"][0] == kit.bos

    assert [first(prompt="a"), first(prompt="a", add_special_tokens=False)] == [True, False]
    assert [first(content="a"), first(content="a", add_special=True)] == [False, True]
    assert [first(messages=TURNS), first(messages=TURNS, add_special_tokens=True)] == [False, True]


def test_the_template_is_the_one_of_the_chat_endpoint(serve):
    server = serve()
    post = server.http.post
    prompt = post("/apply-template", json={"messages": TURNS}).json()
    assert prompt == {"prompt": "[user]hi\n[assistant]"}
    assert (
        post("/apply-template", json={"messages": TURNS, "add_generation_prompt": False}).json()["prompt"]
        == "[user]hi\n"
    )
    ids = post("/tokenize", json={**prompt, "add_special_tokens": False}).json()["tokens"]
    assert server.chat(messages=TURNS, return_token_ids=True).json()["prompt_token_ids"] == ids
    assert post("/apply-template", json={"messages": [{"role": "x", "content": ""}]}).status_code == 400


def test_families_that_are_not_implemented(serve):
    server = serve()
    for path, (why, cure) in ABSENT.items():
        for method, more in (("GET", ""), ("POST", ""), ("DELETE", "/some/id")):
            if not more and path == "/v1/chat/completions":
                continue
            answer = server.http.request(method, path + more)
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")
            message = answer.json()["error"]["message"]
            assert message.startswith(f"{path} is not implemented: {why}")
            assert cure in message
            assert answer.headers["x-should-retry"] == "false"
        assert server.http.get(f"{path}x").status_code == 404


def test_endpoints_that_clients_of_other_servers_probe_are_known():
    probed = (
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora/active", "/sleep", "/wake_up", "/is_sleeping",
        "/release_memory_occupation", "/resume_memory_occupation", "/models/load", "/models/unload", "/pooling", "/api/chat",
        "/v1/chat/completions/chatcmpl-1", "/v1/batches/b/cancel", "/v1/audio/speech", "/v1/images/edits", "/v1/moderations",
    )  # fmt: skip
    assert {absent(path).kind for path in probed} == {"not_implemented"}
    assert [absent(path) for path in ("/v1/modelsx", "/", "/sleeping", "/v2/files", "/hardware")] == [None] * 5


def test_stored_answers_are_told_apart_from_wrong_methods(serve):
    server = serve()
    answer = server.http.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = server.http.get("/v1/chat/completions/chatcmpl-1")
    assert (answer.status_code, "use /v1/responses" in answer.text) == (501, True)


def test_names_as_ollamas_clients_look_for_them(serve):
    server = serve()
    assert server.http.get("/api/tags").json() == {
        "models": [
            {"name": name, "model": name, "modified_at": "2023-11-14T22:13:20Z", "digest": "fp-test"}
            for name in ("tiny", "org/tiny")
        ]
    }
    assert server.http.post("/api/tags").status_code == 405


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURNS, "seed": 1}),
        ("/v1/completions", {"prompt": "The sky", "max_tokens": 4, "seed": 1}),
    ],
)
def test_invocations_are_the_endpoint_whose_field_they_have(serve, kit, path, body):
    server = serve()

    def answer(path, **more):
        return server.http.post(path, json={**body, **more})

    found, meant = answer("/invocations").json(), answer(path).json()
    same = ("object", "model", "choices", "usage")
    assert [found[name] for name in same] == [meant[name] for name in same]
    streamed = kit.events(answer("/invocations", stream=True).text)
    assert len(streamed) == len(kit.events(answer(path, stream=True).text))
    assert streamed[-1] == "[DONE]"
    assert answer("/invocations", temperature=-1).json() == answer(path, temperature=-1).json()


def test_invocations_embed(serve, kit):
    server = serve()
    asked = {"input": ["a"]}
    found = server.http.post("/invocations", json=asked)
    assert found.json() == server.http.post("/v1/embeddings", json=asked).json()
    assert (found.status_code, found.json()["error"]["code"]) == (400, "no_embeddings")


@pytest.mark.parametrize(
    ("body", "field"), [({}, "messages"), ({"messages": TURNS, "prompt": "a"}, "prompt"), ({"inputs": "a"}, "messages")]
)
def test_invocations_that_could_be_anything(serve, body, field):
    answer = serve().http.post("/invocations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_client_of_invocations_that_leaves_ends_its_request(serve, kit):
    server = serve(kit.engine(delay=0.05))
    with server.http.stream("POST", "/invocations", json={"messages": TURNS, "stream": True}) as answer:
        next(answer.iter_lines())
    kit.until(lambda: not server.app.gate.inside)
    assert len(server.engine.aborted) == 1


def test_settings_have_sources_and_no_secrets(serve):
    settings = read_settings({"api_key": ("very-secret",), "port": "1"}, {"ATLAS_MAX_QUEUE": "7"}, "bind = 'localhost'")
    options = ServerOptions.of(settings)
    server = serve(api_keys=options.api_keys, settings=options.settings)
    answer = server.http.get("/server_info", headers={"x-api-key": "very-secret"})
    found = answer.json()
    assert (found["version"], found["status"], found["models"]) == (__version__, "ready", ["tiny", "org/tiny"])
    assert found["settings"]["port"] == {"value": "1", "source": "--port"}
    assert found["settings"]["max_queue"] == {"value": "7", "source": "ATLAS_MAX_QUEUE"}
    assert found["settings"]["bind"] == {"value": "localhost", "source": "atlas.toml: bind"}
    assert found["settings"]["block_size"] == {"value": "16", "source": "built-in"}
    assert found["settings"]["api_key"]["value"] == "(1 given)"
    assert found["settings"].keys() == {name for name, _, _ in Settings().rows()}
    assert found["engine"]["max_seq_len"] == 512
    assert "very-secret" not in answer.text


def test_what_the_machine_decided_wins_over_what_was_built_in(serve, kit, monkeypatch):
    decided = (("max_batch_size", "64", "toy/HARDWARE.toml: max_batch_size"),)
    monkeypatch.setattr(kit.engine, "info", replace(kit.engine().info, settings=decided))
    settings = serve(settings=Settings()).http.get("/server_info").json()["settings"]
    assert settings["max_batch_size"] == {"value": "64", "source": "toy/HARDWARE.toml: max_batch_size"}
    assert settings["max_queue"]["source"] == "built-in"


def test_the_other_name_of_health(serve):
    server = serve()
    assert (server.http.get("/ping").status_code, server.http.get("/ping").json()) == (200, {"status": "ready"})
    server.engine.state = "faulted"
    assert server.http.get("/ping").status_code == 503


def test_strict_names_hold_everywhere(serve):
    server = serve(strict_model=True)
    for path, body in (
        ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}), ("/apply-template", {"messages": TURNS}),
    ):  # fmt: skip
        assert server.http.post(path, json={**body, "model": "tiny"}).status_code == 200
        assert server.http.post(path, json=body).status_code == 200
        answer = server.http.post(path, json={**body, "model": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
