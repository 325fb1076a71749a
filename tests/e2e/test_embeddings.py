"""Models that embed texts, over HTTP, against a forward pass in numpy from the same checkpoint."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Server

from atlas_core.assembly.model import open_model
from atlas_core.plugins import Registry
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import CheckpointError

TINY = Path(__file__).parents[1] / "data" / "tiny"
TRANSFORMER, POOLING, NORMALIZE = (
    {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for n, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")])
)
Weights = dict[str, np.ndarray]


def weights_of(path: Path) -> Weights:
    data = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[8 + size + at["data_offsets"][0] : 8 + size + at["data_offsets"][1]], "<f4").reshape(
            at["shape"]
        )
        for name, at in header.items()
    }


def write_weights(path: Path, weights: Weights) -> None:
    header, offset = {}, 0
    for name, array in weights.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in weights.values())
    )


def embedding_model(folder: Path, source: str, mode: str, *, normalised: bool, bare: bool, **config: Any) -> Path:
    """The tiny model ``source`` as one that embeds; ``bare``: written without the layer of its head, as by sentence-transformers."""
    shutil.copytree(TINY / source, folder, ignore=shutil.ignore_patterns("*.gguf", "golden*", "*.v5.json"))
    (folder / "1_Pooling").mkdir()
    modules = [TRANSFORMER, POOLING, *([NORMALIZE] if normalised else [])]
    (folder / "modules.json").write_text(json.dumps(modules))
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    if bare:
        weights = weights_of(folder)
        write_weights(folder, {n.removeprefix("model."): a for n, a in weights.items() if not n.startswith("lm_head")})
    if config:
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | config))
    return folder


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def hidden(source: str, ids: list[int]) -> np.ndarray:
    """Hidden states [T, size] behind the final norm of a Mistral or Qwen3, float64."""
    weights = {name: array.astype(np.float64) for name, array in weights_of(TINY / source).items()}
    config = json.loads((TINY / source / "config.json").read_text())
    eps, heads, kv_heads = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    count = len(ids)
    seen = np.tril(np.ones((count, count), bool)) & ~np.tril(
        np.ones((count, count), bool), -(config["sliding_window"] or count)
    )
    angle = np.arange(count)[:, None] * config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotated(x: np.ndarray) -> np.ndarray:
        low, high = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    h = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        part = {n.split(f"layers.{layer}.")[1]: a for n, a in weights.items() if f"layers.{layer}." in n}
        x = norm(h, part["input_layernorm.weight"], eps)
        q, k, v = ((x @ part[f"self_attn.{n}_proj.weight"].T).reshape(count, -1, dim) for n in "qkv")
        if "self_attn.q_norm.weight" in part:
            q, k = (norm(y, part[f"self_attn.{n}_norm.weight"], eps) for n, y in (("q", q), ("k", k)))
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
        score = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        score = np.where(seen, score, -np.inf)
        score = np.exp(score - score.max(-1, keepdims=True))
        score /= score.sum(-1, keepdims=True)
        h = h + np.einsum("hqk,khd->qhd", score, v).reshape(count, -1) @ part["self_attn.o_proj.weight"].T
        x = norm(h, part["post_attention_layernorm.weight"], eps)
        gate = x @ part["mlp.gate_proj.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
    return norm(h, weights["model.norm.weight"], eps)


def pooled(states: np.ndarray, mode: str) -> np.ndarray:
    return {"lasttoken": states[-1], "cls_token": states[0], "mean_tokens": states.mean(0)}[mode]


KINDS = [
    ("qwen3", "lasttoken", True, True),
    ("mistral", "mean_tokens", True, False),
    ("qwen3", "cls_token", False, False),
]


@pytest.fixture(scope="module", params=KINDS, ids=["last", "mean", "cls"])
def kind(request: pytest.FixtureRequest) -> tuple[str, str, bool, bool]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(kind: tuple[str, str, bool, bool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("embeddings")
    source, mode, normalised, bare = kind
    model = embedding_model(folder / "model", source, mode, normalised=normalised, bare=bare)
    flags = ("--numerics", "exact", "--max-batch-size", "4", "--max-prefill-tokens", "16", "--max-seq-len", "96")
    running = Server(folder / "log", *flags, model=model)
    try:
        yield running
    finally:
        assert running.stop() == 0, running.log.read_text()


def embed(server: Server, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def floats(data: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data), "<f4")


def test_vectors_are_those_of_the_reference(server: Server, kind: tuple[str, str, bool, bool]) -> None:
    source, mode, normalised, _ = kind
    draw = np.random.default_rng(3)
    # One of a token, one in several steps, one as long as the context, all of them together.
    prompts = [draw.integers(0, 490, size=length).tolist() for length in (1, 5, 16, 33, 96)]
    answer = embed(server, input=prompts, encoding_format="float")
    total = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3, 4]
    for prompt, one in zip(prompts, answer["data"], strict=True):
        want = pooled(hidden(source, prompt), mode)
        want = want / np.linalg.norm(want) if normalised else want
        np.testing.assert_allclose(one["embedding"], want, atol=2e-5)
        alone = embed(server, input=prompt, encoding_format="float")["data"][0]["embedding"]
        assert alone == one["embedding"]  # bit for bit, alone or in company
        short = embed(server, input=prompt, encoding_format="float", dimensions=8)["data"][0]["embedding"]
        first = want[:8] / np.linalg.norm(want[:8]) if normalised else want[:8]
        np.testing.assert_allclose(short, first, atol=5e-5)


def test_texts_are_encoded_as_everywhere(server: Server) -> None:
    texts = ["The sky is blue.", "é"]
    ids = [server.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    by_text, by_ids = embed(server, input=texts), embed(server, input=ids)
    assert by_text == by_ids
    assert floats(by_text["data"][0]["embedding"]).shape == (64,)
    assert embed(server, input=texts, encoding_format="base64") == by_text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": ""}, "input"), ({"input": ["a", ""]}, "input[1]"), ({"input": [[]]}, "input"), ({"input": [[1] * 97]}, "input"),
        ({"input": "a", "dimensions": 65}, "dimensions"), ({"input": "a", "dimensions": 0}, "dimensions"), ({"input": [[512]]}, "input[0]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server: Server, body: dict[str, Any], field: str) -> None:
    response = server.http.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


def test_it_does_nothing_else(server: Server) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "The sky", "max_tokens": 1})
    assert response.status_code == 400
    assert "embeds texts" in response.json()["error"]["message"]


def refused(registry: Registry, model: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_model(
            registry, read_settings({"model": str(model), "hardware": "cpu"}, {}), lambda done, total, note: None
        )
    return str(caught.value)


def test_models_that_embed_in_other_ways_are_refused_at_the_start(registry: Registry, tmp_path: Path) -> None:
    both = embedding_model(tmp_path / "both", "qwen3", "lasttoken", normalised=True, bare=False, is_causal=False)
    assert "attend to those behind them" in refused(registry, both)
    most = embedding_model(tmp_path / "max", "qwen3", "max_tokens", normalised=True, bare=False)
    assert "its pooling is max" in refused(registry, most)
    dense = embedding_model(tmp_path / "dense", "qwen3", "lasttoken", normalised=True, bare=False)
    modules = [TRANSFORMER, POOLING, {**NORMALIZE, "type": "sentence_transformers.models.Dense"}]
    (dense / "modules.json").write_text(json.dumps(modules))
    assert "its modules are Transformer, Pooling, Dense" in refused(registry, dense)
    lost = embedding_model(tmp_path / "lost", "qwen3", "lasttoken", normalised=True, bare=False)
    (lost / "1_Pooling" / "config.json").unlink()
    assert "is not there" in refused(registry, lost)
