from dataclasses import replace

from atlas_core import __version__
from atlas_core.server.app import NOT_HERE
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
    for path in NOT_HERE:
        for method, more in (("GET", ""), ("POST", ""), ("DELETE", "/some/id")):
            answer = server.http.request(method, path + more)
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")
            assert path in answer.json()["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"
        assert server.http.get(f"{path}x").status_code == 404


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
