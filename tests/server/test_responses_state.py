"""What the server remembers: responses, their inputs, conversations; for each key its own."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from atlas_core.server.store.opening import open_store
from atlas_core.server.store.port import StoreLimits

ASK = {"role": "user", "content": "weather?"}


@pytest.fixture(scope="module")
def server(serve_module, kit):
    return serve_module(kit.engine(context=4096))


@pytest.fixture(scope="module")
def sdk(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as sdk:
        yield sdk


def prompt(server):
    return bytes(token for token in server.engine.requests[-1].prompt if token < 256).decode()


def test_a_response_can_be_read_again(sdk):
    made = sdk.responses.create(model="tiny", input="hi")
    assert sdk.responses.retrieve(made.id).model_dump() == made.model_dump()
    assert sdk.responses.delete(made.id) is None
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"


def test_what_is_not_to_be_kept_is_not(sdk):
    made = sdk.responses.create(model="tiny", input="hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(model="tiny", input="on", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_chain_is_the_whole_history(server, sdk, kit):
    first = sdk.responses.create(model="tiny", input="one", instructions="Once.")
    second = sdk.responses.create(
        model="tiny", input=[{"role": "user", "content": "two"}], previous_response_id=first.id
    )
    assert prompt(server) == f"[user]one\n[assistant]{kit.answer}\n[user]two\n[assistant]"
    usage = second.usage.input_tokens
    whole = [
        {"role": "user", "content": "one"},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "two"},
    ]
    assert sdk.responses.create(model="tiny", input=whole, store=False).usage.input_tokens == usage
    counted = sdk.responses.input_tokens.count(model="tiny", input="two", previous_response_id=first.id)
    assert (counted.input_tokens, counted.object) == (usage, "response.input_tokens")
    listed = sdk.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in listed] == ["one", kit.answer, "two"]
    assert sdk.responses.retrieve(second.id).previous_response_id == first.id
    # What was answered stays, whatever becomes of where it came from.
    sdk.responses.delete(first.id)
    sdk.responses.create(model="tiny", input="three", previous_response_id=second.id)
    assert prompt(server).startswith("[user]one\n")


def test_input_items_by_pages(server, sdk):
    texts = [str(number) for number in range(7)]
    made = sdk.responses.create(model="tiny", input=[{"role": "user", "content": text} for text in texts])
    url = f"/v1/responses/{made.id}/input_items"
    mine = {"authorization": "Bearer k"}

    def page(**query):
        return server.http.get(url, params=query, headers=mine).json()

    first = page(limit=3)
    assert [item["content"][0]["text"] for item in first["data"]] == ["6", "5", "4"]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (
        True, first["data"][0]["id"], first["data"][-1]["id"]
    )  # fmt: skip
    rest = page(limit=4, after=first["last_id"])
    assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (["3", "2", "1", "0"], False)
    assert [item.content[0].text for item in sdk.responses.input_items.list(made.id, limit=2, order="asc")] == texts
    end = page(after=rest["last_id"])
    assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_none"}):
        answer = server.http.get(url, params=query, headers=mine)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))


def test_nobody_sees_what_another_key_has(server, sdk):
    made = sdk.responses.create(model="tiny", input="mine")
    talk = sdk.conversations.create(items=[ASK])
    item = sdk.conversations.items.list(talk.id).data[0].id
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0) as other:
        for attempt in (
            lambda: other.responses.retrieve(made.id),
            lambda: other.responses.delete(made.id),
            lambda: other.responses.cancel(made.id),
            lambda: other.responses.input_items.list(made.id),
            lambda: other.conversations.retrieve(talk.id),
            lambda: other.conversations.update(talk.id, metadata={}),
            lambda: other.conversations.delete(talk.id),
            lambda: other.conversations.items.list(talk.id),
            lambda: other.conversations.items.create(talk.id, items=[ASK]),
            lambda: other.conversations.items.retrieve(item, conversation_id=talk.id),
            lambda: other.conversations.items.delete(item, conversation_id=talk.id),
            lambda: other.responses.create(model="tiny", input="x", conversation=talk.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        for body in ({"previous_response_id": made.id}, {"input": [{"type": "item_reference", "id": item}]}):
            with pytest.raises(openai.BadRequestError):
                other.responses.create(**{"model": "tiny", "input": "x"} | body)
    assert sdk.responses.retrieve(made.id).id == made.id
    assert sdk.conversations.retrieve(talk.id).id == talk.id


def test_a_conversation(server, sdk, kit):
    talk = sdk.conversations.create(metadata={"who": "me"}, items=[{"role": "developer", "content": "Rhyme."}])
    assert (talk.id.startswith("conv_"), talk.object, talk.metadata) == (True, "conversation", {"who": "me"})
    first = sdk.responses.create(model="tiny", input="one", conversation=talk.id)
    assert first.conversation.id == talk.id
    events = list(
        sdk.responses.create(model="tiny", input="two", conversation={"id": talk.id}, stream=True, store=False)
    )
    assert events[-1].type == "response.completed"
    history = f"[developer]Rhyme.\n[user]one\n[assistant]{kit.answer}\n[user]two\n"
    assert prompt(server) == f"{history.replace('developer', 'system')}[assistant]"
    counted = sdk.responses.input_tokens.count(input="three", conversation=talk.id).input_tokens
    assert sdk.responses.create(model="tiny", input="three", conversation=talk.id).usage.input_tokens == counted
    items = sdk.conversations.items.list(talk.id, order="asc").data
    assert [item.role for item in items] == ["developer", *["user", "assistant"] * 3]
    assert items[2].id == first.output[0].id
    one = sdk.conversations.items.retrieve(items[1].id, conversation_id=talk.id)
    assert one.model_dump() == items[1].model_dump()
    assert sdk.conversations.items.delete(items[1].id, conversation_id=talk.id).id == talk.id
    assert len(sdk.conversations.items.list(talk.id).data) == 6
    added = sdk.conversations.items.create(
        talk.id, items=[{"role": "user", "content": "four"}, {"role": "assistant", "content": "4"}]
    )
    assert [item.content[0].text for item in added.data] == ["four", "4"]
    assert [item.id for item in sdk.conversations.items.list(talk.id, limit=2)][:2] == [added.last_id, added.first_id]
    assert sdk.conversations.update(talk.id, metadata={"x": "y"}).metadata == {"x": "y"}
    assert sdk.conversations.retrieve(talk.id).metadata == {"x": "y"}
    deleted = sdk.conversations.delete(talk.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (talk.id, True, "conversation.deleted")
    for attempt in (sdk.conversations.retrieve, sdk.conversations.delete, sdk.conversations.items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            attempt(talk.id)
        assert caught.value.code == "conversation_not_found"


def test_responses_to_one_conversation_take_turns(serve, kit):
    engine = kit.engine(delay=0.002, context=8192)
    server = serve(engine)
    talk, other = (server.http.post("/v1/conversations").json()["id"] for _ in range(2))

    def respond(text, conversation=talk, **more):
        body = {"input": text, "conversation": conversation, **more}
        return server.http.post("/v1/responses", json=body, timeout=20)

    with ThreadPoolExecutor(5) as threads:
        asked = [threads.submit(respond, f"n{n}", background=n == 1, stream=n == 2) for n in range(4)] + [
            threads.submit(respond, "elsewhere", other)
        ]
        assert {one.result().status_code for one in asked} == {200}
    kit.until(lambda: not server.app.gate.inside)
    items = server.http.get(f"/v1/conversations/{talk}/items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"] * 4
    assert {item["content"][0]["text"] for item in items[::2]} == {"n0", "n1", "n2", "n3"}
    # Each answered all that came before it.
    sizes = [
        len(request.prompt)
        for request in engine.requests
        if b"elsewhere" not in bytes(t for t in request.prompt if t < 256)
    ]
    assert sizes == sorted(set(sizes))
    assert not server.app.table.find("/v1/responses").endpoint._turns._lines


def test_a_client_that_leaves_the_line_holds_up_nobody(serve, kit):
    server = serve(kit.engine(delay=0.02))
    talk = server.http.post("/v1/conversations").json()["id"]
    body = {"input": "x", "conversation": talk}
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(server.http.post, "/v1/responses", json=body)
        kit.until(lambda: server.engine.running == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/responses", json=body, timeout=0.05, trust_env=False)
        assert first.result().status_code == 200
    assert server.http.post("/v1/responses", json=body).status_code == 200
    assert len(server.http.get(f"/v1/conversations/{talk}/items").json()["data"]) == 4


def test_a_conversation_needs_no_body(server):
    made = server.http.post("/v1/conversations").json()
    assert made["metadata"] == {}
    items = server.http.get(f"/v1/conversations/{made['id']}/items").json()
    assert (items["data"], items["first_id"], items["has_more"]) == ([], None, False)
    answer = server.http.post("/v1/responses", json={"conversation": made["id"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [ASK] * 21}, "items"),
        ({"items": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "items[0].call_id"),
        ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0]"),
        ({"items": [{"role": "user"}]}, "items[0].content"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ],
)
def test_conversations_refuse(server, body, param):
    answer = server.http.post("/v1/conversations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_items_are_referred_to(server, sdk, kit):
    first = sdk.responses.create(model="tiny", input="one")
    message = first.output[0].id
    body = [
        {"role": "user", "content": "one"},
        {"type": "item_reference", "id": message},
        {"role": "user", "content": "two"},
    ]
    sdk.responses.create(model="tiny", input=body)
    assert prompt(server) == f"[user]one\n[assistant]{kit.answer}\n[user]two\n[assistant]"
    sdk.responses.create(
        model="tiny", input=[{"id": message}, {"role": "user", "content": "x"}], previous_response_id=first.id
    )
    assert prompt(server).count(kit.answer) == 1
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(model="tiny", input=[{"type": "item_reference", "id": "msg_unknown"}])
    assert (caught.value.param, caught.value.code) == ("input[0].id", "item_not_found")


def test_only_one_past(sdk):
    made = sdk.responses.create(model="tiny", input="one")
    talk = sdk.conversations.create()
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(model="tiny", input="x", previous_response_id=made.id, conversation=talk.id)
    assert caught.value.param == "conversation"


def test_an_answer_that_nobody_waits_for_is_not_kept(serve, kit):
    server = serve(kit.engine(delay=0.05))
    with server.http.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}) as answer:
        name = (
            next(line for line in answer.iter_lines() if line.startswith("data: "))
            .partition('"id":"')[2]
            .partition('"')[0]
        )
    assert name.startswith("resp_")
    kit.until(lambda: server.engine.aborted)
    assert server.http.get(f"/v1/responses/{name}").status_code == 404


def test_the_key_that_let_a_request_in_is_whose_it_is(serve, kit):
    server = serve(kit.engine(), api_keys=("one", "two"))

    def ask(method, path, key, **more):
        # A client that always sends some bearer, as SDKs do, and its key otherwise.
        return server.http.request(method, path, headers={"authorization": "Bearer dummy", "x-api-key": key}, **more)

    name = ask("POST", "/v1/responses", "one", json={"input": "mine"}).json()["id"]
    assert ask("GET", f"/v1/responses/{name}", "one").status_code == 200
    assert ask("GET", f"/v1/responses/{name}", "two").status_code == 404
    plain = server.http.get(f"/v1/responses/{name}", headers={"authorization": "Bearer one"})
    assert plain.status_code == 200


def test_a_server_that_keeps_nothing(serve, kit):
    server = serve(kit.engine(), store=open_store("none", StoreLimits()))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as sdk:
        made = sdk.responses.create(model="tiny", input="hi")
        assert (made.store, made.output_text) == (False, kit.answer)
        for attempt, error, code in (
            (lambda: sdk.responses.retrieve(made.id), openai.NotFoundError, "response_not_found"),
            (lambda: sdk.responses.create(model="tiny", input="x", previous_response_id=made.id), openai.BadRequestError, "previous_response_not_found"),
            (lambda: sdk.responses.create(model="tiny", input="x", background=True), openai.BadRequestError, "invalid_value"),
            (lambda: sdk.responses.create(model="tiny", input="x", conversation="conv_1"), openai.NotFoundError, "conversation_not_found"),
            (lambda: sdk.responses.create(model="tiny", input=[{"type": "item_reference", "id": "msg_1"}]), openai.BadRequestError, "item_not_found"),
            (sdk.conversations.create, openai.BadRequestError, "store_off"),
            (lambda: sdk.conversations.delete("conv_1"), openai.NotFoundError, "conversation_not_found"),
        ):  # fmt: skip
            with pytest.raises(error) as caught:
                attempt()
            assert caught.value.code == code
