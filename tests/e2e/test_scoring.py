"""Log-probabilities of prompts over HTTP, as evaluation harnesses ask for them, against the reference's logits."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from serving import TINY, Server

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["7", "2048"], ids=["in pieces", "whole"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scoring")
    running = Server(
        folder / "log", "--numerics", "exact", "--max-batch-size", "4", "--max-prefill-tokens", request.param
    )
    try:
        yield running
    finally:
        assert running.stop() == 0, running.log.read_text()


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(TINY / "golden.npz") as file:
        found = dict(file)
    logits = found["prefill_logits"].astype(np.float64)
    high = logits.max(-1, keepdims=True)
    return found | {"log": logits - high - np.log(np.exp(logits - high).sum(-1, keepdims=True))}


def score(server: Server, **body: Any) -> dict[str, Any]:
    asked = {"echo": True, "logprobs": 2, "temperature": 0, **body}
    return dict(server.complete(**asked)["choices"][0])


@pytest.mark.parametrize("generated", [0, 1])
def test_an_echo_has_the_log_probabilities_of_the_reference(
    server: Server, golden: dict[str, np.ndarray], generated: int
) -> None:
    ids = golden["input_ids"].tolist()
    choice = score(server, prompt=ids, max_tokens=generated, return_token_ids=True)
    found = choice["logprobs"]
    assert choice["prompt_token_ids"] == ids
    assert len(choice["token_ids"]) == generated
    assert choice["finish_reason"] == "length"
    assert {len(values) for values in found.values()} == {len(ids) + generated}
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    log = golden["log"]
    want = [log[index, token] for index, token in enumerate(ids[1:])]
    want += [log[-1].max()] * generated
    np.testing.assert_allclose(found["token_logprobs"][1:], want, atol=TOLERANCE)
    for index, top in enumerate(found["top_logprobs"][1:]):
        best = np.sort(log[index])[::-1][:2]
        assert max(top.values()) == pytest.approx(best[0], abs=TOLERANCE)
        assert len(top) <= 3


def test_offsets_point_into_the_echo(server: Server) -> None:
    choice = score(server, prompt="The world – naïve 好 rain", max_tokens=0)
    assert choice["text"] == "The world – naïve 好 rain"
    found = choice["logprobs"]
    assert found["text_offset"] == sorted(found["text_offset"])
    told = 0
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:") and token in choice["text"]:
            told += len(token)
            assert choice["text"].startswith(token, at)
    assert told > 10


def test_a_stream_says_the_same(server: Server, golden: dict[str, np.ndarray]) -> None:
    body = {"prompt": golden["input_ids"].tolist(), "max_tokens": 4, "echo": True, "logprobs": 1, "temperature": 0}
    whole = server.complete(**body)["choices"][0]
    text, joined = "", dict[str, list[Any]]()
    for choice in server.stream(**body):
        text += choice["text"]
        for name, values in choice["logprobs"].items():
            joined[name] = joined.get(name, []) + values
    assert (text, joined) == (whole["text"], whole["logprobs"])


def test_prompt_logprobs_of_a_completion(server: Server, golden: dict[str, np.ndarray]) -> None:
    ids = golden["input_ids"].tolist()
    choice = score(server, prompt=ids, echo=False, logprobs=None, prompt_logprobs=3, max_tokens=1)
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for index, (token, entries) in enumerate(zip(ids[1:], others, strict=True)):
        log = golden["log"][index]
        order = np.argsort(-log, kind="stable")
        assert entries[str(token)]["logprob"] == pytest.approx(log[token], abs=TOLERANCE)
        for rank, best in enumerate(order[:3].tolist(), 1):
            assert entries[str(best)]["rank"] == rank
            assert entries[str(best)]["logprob"] == pytest.approx(log[best], abs=TOLERANCE)
        assert len(entries) == 3 + (token not in order[:3])


def test_prompt_logprobs_of_a_chat(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    response = server.http.post("/v1/chat/completions", json=body)
    if response.status_code == 400:
        pytest.fail(response.text)
    answer = response.json()
    ids = answer["prompt_token_ids"]
    assert [None if one is None else [*one] for one in answer["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in ids[1:]),
    ]
    echoed = score(server, prompt=ids, max_tokens=0)
    told = [next(iter(one.values()))["logprob"] for one in answer["prompt_logprobs"][1:]]
    assert told == echoed["logprobs"]["token_logprobs"][1:]


def test_scoring_disturbs_nobody_and_is_not_disturbed(server: Server, golden: dict[str, np.ndarray]) -> None:
    long = golden["long_ids"].tolist()
    alone = score(server, prompt=long, max_tokens=0)
    plain = {
        "prompt": golden["input_ids"].tolist(),
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with ThreadPoolExecutor(6) as pool:
        scores = [pool.submit(score, server, prompt=long, max_tokens=0) for _ in range(3)]
        others = [pool.submit(server.complete, **plain) for _ in range(3)]
        assert [one.result() for one in scores] == [alone] * 3
        for other in others:
            assert other.result()["choices"][0]["token_ids"] == golden["gen_ids"].tolist()


@pytest.mark.parametrize(
    ("body", "field"),
    [({"max_tokens": 0}, "max_tokens"), ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
     ({"prompt": [[5] * 500] * 100, "prompt_logprobs": 20}, "prompt_logprobs")],
)  # fmt: skip
def test_what_cannot_be_asked_for(server: Server, body: dict[str, Any], field: str) -> None:
    response = server.http.post("/v1/completions", json={"prompt": [5, 6], **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
