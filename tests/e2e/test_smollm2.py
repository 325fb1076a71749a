"""The main job: ``atlas serve smollm2`` answers over HTTP, and every id is that of the float32 reference."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "data/goldens/smollm2.json").read_text())
PROMPTS = {prompt["name"]: prompt for prompt in GOLDEN["prompts"]}
START_S = 300


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of its own, as an operator starts it; ends with SIGTERM and must exit with 0."""
    command = [
        sys.executable,
        "-m",
        "atlas_core",
        "serve",
        "smollm2",
        "--port",
        "0",
        "--hardware",
        "cpu",
        "--numerics",
        "exact",
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            lines.append(line)
            if line.startswith("ready: "):
                found.set()
        found.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert found.wait(START_S), "".join(lines)
        match = re.search(r"^ready: (\S+)/v1", "".join(lines), re.MULTILINE)
        assert match, "".join(lines)
        yield match[1]
    finally:
        server.terminate()
        code = server.wait(60)
        thread.join()
        assert server.stderr is not None
        server.stderr.close()
    assert code == 0, "".join(lines)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


def complete(client: httpx.Client, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": 64,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


@pytest.mark.parametrize("name", PROMPTS)
def test_golden_prompts_as_ids(client: httpx.Client, name: str) -> None:
    golden = PROMPTS[name]
    choice = complete(client, golden["prompt_ids"])
    assert choice["token_ids"] == golden["generated_ids"]
    assert choice["finish_reason"] == ("stop" if golden["generated_ids"][-1] == 2 else "length")


@pytest.mark.parametrize("name", PROMPTS)
def test_golden_prompts_as_text(client: httpx.Client, name: str) -> None:
    golden = PROMPTS[name]
    choice = complete(client, golden["prompt"])
    assert choice["prompt_token_ids"] == golden["prompt_ids"]
    assert choice["token_ids"] == golden["generated_ids"]
    assert choice["text"] == golden["text"].removesuffix("<|im_end|>")


def test_all_at_once_give_the_same(client: httpx.Client) -> None:
    """Six sequences in one batch, streamed, against the same goldens."""
    results: dict[str, list[int]] = {name: [] for name in PROMPTS}

    def run(name: str) -> None:
        body = {
            "model": "m", "prompt": PROMPTS[name]["prompt_ids"], "max_tokens": 64, "temperature": 0, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        results[name] += choice["token_ids"]

    threads = [threading.Thread(target=run, args=(name,)) for name in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: prompt["generated_ids"] for name, prompt in PROMPTS.items()}


def test_chat_through_the_official_sdk(url: str) -> None:
    """The same conversation as the golden, as messages: the template must give the golden's prompt."""
    golden = PROMPTS["chat_system"]
    sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [
        {"role": "system", "content": "You are a terse assistant."},
        {"role": "user", "content": "List three primary colors."},
    ]
    answer = sdk.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=64)
    assert answer.choices[0].message.content == golden["text"].removesuffix("<|im_end|>")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(golden["prompt_ids"]), 64)
    stream = sdk.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=64, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content


def test_logprobs_are_those_of_the_model(client: httpx.Client) -> None:
    """The best alternative at temperature 0 is the sampled token; its value is the reference's."""
    choice = complete(client, PROMPTS["capital"]["prompt"], max_tokens=1, logprobs=2)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [" Paris"]
    assert logprobs["token_logprobs"][0] == pytest.approx(-0.2582, abs=2e-3)
    assert max(logprobs["top_logprobs"][0].values()) == logprobs["token_logprobs"][0]


def test_seeded_sampling_repeats_alone_and_in_company(client: httpx.Client) -> None:
    fields = {"temperature": 0.9, "seed": 1234, "max_tokens": 20}
    prompt = PROMPTS["story"]["prompt_ids"]
    first = complete(client, prompt, **fields)["token_ids"]
    company = threading.Thread(target=complete, args=(client, PROMPTS["code"]["prompt_ids"]))
    company.start()
    assert complete(client, prompt, **fields)["token_ids"] == first
    company.join()
    assert complete(client, prompt, **{**fields, "seed": 1235})["token_ids"] != first


def test_metrics_and_models(client: httpx.Client) -> None:
    assert client.get("/health").json()["status"] == "ready"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["smollm2"]
    assert "atlas_generation_tokens_total" in client.get("/metrics").text
