import array
import asyncio
import base64
import re

import openai
import pytest

from atlas_core.server.ports import Service
from atlas_core.vocab.errors import EngineError


class Embedder:
    """The vector of a prompt is its length, its first id, and a third of it."""

    size = 3
    normalised = False
    prompt = ""

    def __init__(self):
        self.most = self.now = 0
        self.broken = False

    async def embed(self, ids):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.005)
            if self.broken:
                raise EngineError("the engine is gone", state="gone")
            return [float(len(ids)), float(ids[0]), len(ids) / 3]
        finally:
            self.now -= 1


@pytest.fixture
def server(serve, kit):
    embedder, engine = Embedder(), kit.engine(slots=2)

    async def bring_up(on_progress):
        return Service(engine, kit.model(), embedder)

    server = serve(engine, bring_up=bring_up, max_queue=8)
    server.embedder = embedder
    return server


def embed(server, encoding_format="float", **body):
    return server.http.post("/v1/embeddings", json={"encoding_format": encoding_format, **body})


def test_every_form_of_input(server, kit):
    answer = embed(server, input="hi", model="org/tiny").json()
    assert answer == {
        "object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [3.0, float(kit.bos), 1.0]}],
        "model": "org/tiny", "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }  # fmt: skip
    assert [one["embedding"][0] for one in embed(server, input=["é", "a", "abc"]).json()["data"]] == [3, 2, 4]
    assert embed(server, input=[5, 6]).json()["data"][0]["embedding"] == [2.0, 5.0, 2 / 3]
    answer = embed(server, input=[[5], [6, 7]]).json()
    assert [(one["index"], one["embedding"][:2]) for one in answer["data"]] == [(0, [1, 5]), (1, [2, 6])]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_base64_is_little_endian_float32(server):
    text = embed(server, input=[5, 6], encoding_format="base64").json()["data"][0]["embedding"]
    assert base64.b64decode(text).hex() == "000000400000a040abaa2a3f"
    values = array.array("f", base64.b64decode(text))
    assert list(values) == pytest.approx([2, 5, 2 / 3])


def test_the_sdk(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as sdk:
        found = sdk.embeddings.create(model="tiny", input=["a", "bcd"])
        plain = sdk.embeddings.create(model="tiny", input=["a", "bcd"], encoding_format="float")
    assert [one.embedding for one in found.data] == [pytest.approx(one.embedding) for one in plain.data]
    assert found.usage.prompt_tokens == 6


def test_prompts_are_counted(server):
    def counted():
        return float(re.search(r"^atlas_prompt_tokens_total (\S+)$", server.http.get("/metrics").text, re.MULTILINE)[1])

    before = counted()
    embed(server, input=[[5], [6, 7]])
    assert counted() == before + 3


def test_many_inputs_take_turns(server):
    assert len(embed(server, input=["x"] * 20).json()["data"]) == 20
    assert server.embedder.most == 2
    assert server.app.gate.inside == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"), ({"input": []}, "input"), ({"input": [[]]}, "input"), ({"input": ["a", 1]}, "input"),
        ({"input": [300]}, "input[0]"), ({"input": "x" * 600}, "input"), ({"input": ["a", "x" * 600]}, "input[1]"),
        ({"input": "a", "dimensions": 4}, "dimensions"), ({"input": "a", "dimensions": 0}, "dimensions"), ({"input": ""}, "input"), ({"input": ["a", ""]}, "input[1]"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["a"] * 2049}, "input"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server, body, field):
    answer = embed(server, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_fewer_dimensions(server):
    def numbers(**more):
        return embed(server, input=[5, 6], **more).json()["data"][0]["embedding"]

    assert numbers(dimensions=3) == numbers() == [2, 5, 2 / 3]
    assert numbers(dimensions=2) == [2, 5]
    server.embedder.normalised = True
    assert numbers(dimensions=2) == pytest.approx([2 / 29**0.5, 5 / 29**0.5])
    assert sum(value * value for value in numbers()) == pytest.approx(1)


def test_base64_unless_said_otherwise(server):
    plain = server.http.post("/v1/embeddings", json={"input": [5, 6]}).json()["data"][0]["embedding"]
    assert plain == embed(server, "base64", input=[5, 6]).json()["data"][0]["embedding"]


def test_a_prompt_of_the_model_stands_before_texts(server):
    server.embedder.prompt = "ab"
    assert embed(server, input=["c"]).json()["usage"]["prompt_tokens"] == 4
    assert embed(server, input=[[5]]).json()["usage"]["prompt_tokens"] == 1


def test_texts_bring_no_control_tokens(server):
    assert embed(server, input="<eos>").json()["data"][0]["embedding"][0] == 6


def test_an_engine_that_fails(server):
    server.embedder.broken = True
    assert embed(server, input=["a", "b"]).status_code == 503
    assert server.app.gate.inside == 0


def test_models_that_give_none(serve):
    answer = embed(serve(), input="a")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "no_embeddings", "model")
    assert "tiny" in error["message"]


def test_strict_names(serve, kit):
    assert embed(serve(strict_model=True), input="a", model="other").status_code == 404


def test_the_example_of_the_document(server):
    operation = server.app.table.find("/v1/embeddings")
    assert embed(server, **operation.example).status_code == 200


def test_invocations_with_an_input_embed(server):
    asked = {"input": ["ab", "c"], "encoding_format": "float"}
    found = server.http.post("/invocations", json=asked).json()
    assert found == server.http.post("/v1/embeddings", json=asked).json()
    assert [len(entry["embedding"]) for entry in found["data"]] == [3, 3]
