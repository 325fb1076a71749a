"""What a real client makes of the answers."""

import openai
import pytest


@pytest.fixture
def client(serve, kit):
    server = serve(kit.engine(delay=0.001), api_keys=("k",))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as sdk:
        sdk.server = server
        yield sdk


MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat(client, kit):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True})  # fmt: skip
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (kit.answer, "assistant", "stop")
    assert answer.usage.completion_tokens == len(choice.logprobs.content) == len(choice.token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer._request_id.startswith("req_")


def test_chat_stream_helper(client, kit):
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, stream_options={"include_usage": True}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == kit.answer
    assert final.usage.completion_tokens == len(kit.answer.encode()) + 1


def test_completions(client, kit):
    chunks = list(client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=8, stream=True, logprobs=1))
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    whole = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=8, logprobs=1)
    assert texts == [choice.text for choice in whole.choices]
    assert whole.choices[0].logprobs.token_logprobs == [-0.5] * 8
    assert whole.choices[0].finish_reason == "length"


def test_models(client):
    assert [entry.id for entry in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "tools",
        "unsupported_parameter",
        "invalid_request_error",
    )
    with pytest.raises(openai.AuthenticationError) as caught, client.with_options(api_key="no") as stranger:
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"


def test_a_stream_that_breaks_raises(client, kit):
    client.server.engine.answer = lambda request: kit.deltas(request)[:5]
    with pytest.raises(openai.APIError, match="ended the request early"):
        for _ in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
            pass


def test_closing_a_stream_aborts(client, kit):
    client.server.engine.context = 10**6
    client.server.engine.answer = lambda request: kit.deltas(request, context=10**4)
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, max_tokens=4096, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.close()
    kit.until(lambda: client.server.engine.aborted, seconds=1)
