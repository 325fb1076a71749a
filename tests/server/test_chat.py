import json

import pytest


def test_a_whole_answer(serve, kit):
    server = serve()
    response = server.chat(model="org/tiny", seed=7)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert (body["model"], body["system_fingerprint"]) == ("org/tiny", "fp-test")
    assert body["choices"] == [
        {
            "index": 0, "message": {"role": "assistant", "content": kit.answer, "refusal": None}, "logprobs": None,
            "finish_reason": "stop",
        }
    ]  # fmt: skip
    prompt = b"[user]hi\n[assistant]"
    generated = len(kit.answer.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": generated, "total_tokens": len(prompt) + generated,
        "prompt_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    sent = server.engine.requests[0]
    assert sent.prompt == tuple(prompt)
    assert (sent.sampling.seed, sent.sampling.max_tokens) == (7, None)


def test_a_stream_says_the_same(serve, kit):
    server = serve()
    whole = server.chat(logprobs=True, top_logprobs=2, return_token_ids=True).json()
    response = server.chat(
        logprobs=True, top_logprobs=2, return_token_ids=True, stream=True, stream_options={"include_usage": True}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    payloads = kit.events(response.text)
    assert payloads[-1] == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    *parts, last = chunks
    assert {(c["id"], c["created"], c["object"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk", "tiny")
    }
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(part["usage"] is None and len(part["choices"]) == 1 for part in parts)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert parts[-1]["choices"][0]["delta"] == {}
    choices = [part["choices"][0] for part in parts[1:-1]]
    wanted = whole["choices"][0]
    assert "".join(choice["delta"]["content"] for choice in choices) == wanted["message"]["content"]
    assert [entry for choice in choices for entry in choice["logprobs"]["content"]] == wanted["logprobs"]["content"]
    assert [token for choice in choices for token in choice["token_ids"]] == wanted["token_ids"]


def test_without_include_usage_there_is_none(serve, kit):
    payloads = kit.events(serve().chat(stream=True).text)
    assert all("usage" not in json.loads(payload) for payload in payloads[:-1])
    assert json.loads(payloads[-2])["choices"][0]["finish_reason"] == "stop"


def test_held_back_text_makes_no_empty_chunks(serve, kit):
    response = serve().chat(stream=True, stop=["one two", "never"])
    chunks = [json.loads(payload)["choices"][0] for payload in kit.events(response.text)[:-1]]
    contents = [chunk["delta"].get("content") for chunk in chunks]
    assert all(contents[1:-1])
    assert "".join(contents[1:-1]) == "“é😀” said: "
    assert chunks[-1]["finish_reason"] == "stop"


def test_logprobs(serve, kit):
    server = serve()
    for asked, count in (({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 0}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)):  # fmt: skip
        choice = server.chat(**asked).json()["choices"][0]
        entries = choice["logprobs"]["content"]
        assert choice["logprobs"]["refusal"] is None
        assert len(entries) == len(kit.answer.encode()) + 1
        assert entries[-1]["bytes"] is None  # the end of the turn is a token, and adds no text
        joined = bytes(byte for entry in entries for byte in entry["bytes"] or ())
        assert joined.decode() == choice["message"]["content"]
        assert {len(entry["top_logprobs"]) for entry in entries} == {count}
        for entry in entries:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert values[:1] == [entry["logprob"]] * (count > 0)
    assert values[4] == -9999.0  # minus infinity, which JSON cannot say


@pytest.mark.parametrize("asked", [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 1}])  # fmt: skip
def test_logprobs_that_are_refused(serve, asked):
    response = serve().chat(**asked)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")


def test_choices(serve, kit):
    server = serve(kit.engine(answer=lambda request: kit.deltas(request, f"seed {request.sampling.seed}")))
    body = server.chat(n=3, seed=2**63 - 1).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == [f"seed {2**63 - 1}", f"seed {-(2**63)}", f"seed {-(2**63) + 1}"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == len(b"[user]hi\n[assistant]")
    streamed = ["", "", ""]
    for payload in kit.events(server.chat(n=3, seed=2**63 - 1, stream=True).text)[:-1]:
        choice = json.loads(payload)["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts
    assert len({request.id for request in server.engine.requests}) == 6
    server.chat(n=2)
    assert [request.sampling.seed for request in server.engine.requests[-2:]] == [None, None]


def test_the_conversation(serve):
    server = serve()
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "go"},
    ]
    assert server.chat(messages=turns).status_code == 200
    assert bytes(server.engine.requests[-1].prompt) == b"[system]be brief\n[user]ab\n[assistant]\n[user]go\n[assistant]"
    turns[-1] = {"role": "assistant", "content": "so far"}
    assert server.chat(messages=turns, continue_final_message=True).status_code == 200
    assert bytes(server.engine.requests[-1].prompt).endswith(b"[assistant]so far")
    assert server.chat(messages=turns, add_generation_prompt=False).status_code == 200
    assert bytes(server.engine.requests[-1].prompt).endswith(b"[assistant]so far\n")
    assert server.chat(chat_template_kwargs={"messages": []}).json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "root", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":'}}]}], "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_bad_messages(serve, messages, param):
    response = serve().chat(messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_model_without_a_template(serve, kit):
    response = serve(served=kit.model(template=None)).chat()
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_chat_template")
