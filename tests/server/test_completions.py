import json
import threading

import pytest
from msgspec.structs import replace

from atlas_core.server.completions import Completions


def test_text_and_ids_are_the_same_prompt(serve, kit):
    server = serve()
    ids = [kit.bos, *b"hi"]
    text = server.complete().json()
    assert server.engine.requests[-1].prompt == tuple(ids)
    assert server.complete(prompt=ids).json()["choices"] == text["choices"]
    assert text["choices"] == [{"index": 0, "text": kit.answer, "logprobs": None, "finish_reason": "stop"}]
    assert (text["object"], text["id"][:5]) == ("text_completion", "cmpl-")
    server.complete(add_special_tokens=False)
    assert server.engine.requests[-1].prompt == tuple(b"hi")


@pytest.mark.parametrize("prompt", [["a", "bc"], [[1, 2], [3]]])
def test_several_prompts(serve, kit, prompt):
    server = serve(
        kit.engine(answer=lambda request: kit.deltas(request, f"{len(request.prompt)} {request.sampling.seed}"))
    )
    body = server.complete(prompt=prompt, n=2, seed=5, return_token_ids=True, echo=True).json()
    sizes = [2, 3] if prompt[0] == "a" else [2, 1]
    echoes = ["a", "bc"] if prompt[0] == "a" else ["\x01\x02", "\x03"]
    assert [c["text"] for c in body["choices"]] == [
        f"{echo}{size} {seed}" for size, echo in zip(sizes, echoes, strict=True) for seed in (5, 6)
    ]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [len(c["prompt_token_ids"]) for c in body["choices"]] == [sizes[0], sizes[0], sizes[1], sizes[1]]
    assert [bytes(c["token_ids"][:-1]).decode() for c in body["choices"]] == [
        f"{size} {seed}" for size in sizes for seed in (5, 6)
    ]
    assert body["usage"]["prompt_tokens"] == sum(sizes)


@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"logprobs": 3}, {"return_token_ids": True, "n": 2}, {"stop": "two"}]
)
def test_a_stream_says_the_same(serve, kit, more):
    server = serve()
    whole = server.complete(**more).json()["choices"]
    streamed = [
        {
            "text": "",
            "token_ids": [],
            "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []},
        }
        for _ in whole
    ]
    for payload in kit.events(server.complete(stream=True, **more).text)[:-1]:
        choice = json.loads(payload)["choices"][0]
        into = streamed[choice["index"]]
        into["text"] += choice["text"]
        into["finish_reason"] = choice["finish_reason"]
        into["token_ids"] += choice.get("token_ids", [])
        for name, values in (choice["logprobs"] or {}).items():
            into["logprobs"][name] += values
    for choice, into in zip(whole, streamed, strict=True):
        assert into["text"] == choice["text"]
        assert into["finish_reason"] == choice["finish_reason"] == "stop"
        assert into["token_ids"] == choice.get("token_ids", [])
        if choice["logprobs"]:
            assert into["logprobs"] == choice["logprobs"]


def test_legacy_logprobs(serve, kit):
    choice = serve().complete(logprobs=5).json()["choices"][0]
    found = choice["logprobs"]
    assert found["tokens"][:3] == ["bytes:\\xe2", "bytes:\\x80", "bytes:\\x9c"]
    # Parts of one character share its place: “ is three bytes, é two, 😀 four.
    assert found["text_offset"][:10] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    at = found["tokens"].index("s")
    assert choice["text"][found["text_offset"][at]] == "s"
    assert found["token_logprobs"] == [-0.5] * len(found["tokens"])
    assert found["top_logprobs"][at] == {"s": -0.5, "t": -1.5, "u": -2.5, "v": -3.5, "w": -9999.0}
    assert serve().complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][at] == {"s": -0.5}


def test_hidden_tokens_take_no_room(serve, kit):
    server = serve(kit.engine(answer=lambda request: kit.deltas(request, "a")))
    hidden = server.complete(logprobs=0, ignore_eos=True, max_tokens=4).json()["choices"][0]
    assert (hidden["text"], hidden["logprobs"]["text_offset"]) == ("aa", [0, 1, 1, 2])
    shown = server.complete(logprobs=0, ignore_eos=True, max_tokens=4, skip_special_tokens=False).json()["choices"][0]
    assert (shown["text"], shown["logprobs"]["text_offset"]) == ("a<eos>a<eos>", [0, 1, 6, 7])


def test_the_default_length_is_sixteen(serve):
    server = serve()
    body = server.complete(max_tokens=None, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 1.5]}, "prompt[1]"),
        ({"prompt": [1, 260]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1], [2, 999]]}, "prompt[1][1]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_is_refused(serve, more, param):
    response = serve().complete(**more)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_the_best_of_several(serve, kit):
    """Answer j of a prompt is "j" and has the j-th of these means: the second and the last are the best."""
    means = [-3.0, -1.0, -4.0, -2.0]

    def answer(request):
        number = request.sampling.seed - 10
        made = kit.deltas(request, f"{number}")
        assert request.sampling.logprobs is not None
        return [
            delta._replace(logprobs=tuple(replace(p, chosen=replace(p.chosen, logprob=means[number] + (-0.5 if n else 0.5))) for p in delta.logprobs))
            for n, delta in enumerate(made)
        ]  # fmt: skip

    server = serve(kit.engine(answer=answer))

    def texts(body):
        assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
        return [choice["text"] for choice in body["choices"]]

    body = server.complete(prompt=["a", "b"], best_of=4, n=2, seed=10).json()
    assert texts(body) == ["1", "3", "1", "3"]
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * 4
    assert body["usage"]["completion_tokens"] == 2 * 4 * 2
    body = server.complete(best_of=3, seed=10, logprobs=1, echo=False).json()
    assert texts(body) == ["1"]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -1.5]
    assert len(server.engine.requests) == 8 + 3


def test_a_missing_prompt(serve):
    response = serve().http.post("/v1/completions", json={"model": "m"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("more", "quick"),
    [
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": [1, 2, 3], "structured_outputs": {}}, True),
        ({"prompt": "text"}, False),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": [1, 2, 3], "echo": True}, False),
        ({"prompt": [1, 2, 3], "regex": "a+"}, False),
        ({"prompt": [1, 2, 3], "structured_outputs": {"regex": "a+"}}, False),
    ],
)
def test_ids_alone_are_looked_at_without_another_thread(serve, monkeypatch, more, quick):
    threads = []
    prompts = Completions.prompts

    def seen(self, request, model, info):
        threads.append(threading.current_thread())
        assert self.quick(request) == quick
        assert self.count(request) == len(
            prompts(self, replace(request, regex=None, structured_outputs=None), model, info)
        )
        return prompts(self, request, model, info)

    monkeypatch.setattr(Completions, "prompts", seen)
    server = serve()
    server.complete(**more)
    server.complete(prompt=[7])  # whoever looks at this is the thread of the event loop
    assert (threads[0] is threads[1]) == quick
