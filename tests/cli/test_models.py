import hashlib
import json

from atlas_core.contracts.declarations import CatalogueEntry
from atlas_core.loading import cached
from atlas_core.loading.fetch import catalogue_target

ENTRY = CatalogueEntry("toy", "a toy", "some/toy", "sub/toy.gguf", hashlib.sha256(b"toy").hexdigest())
COMMIT = "a" * 40


def hub(tmp_path, repo, files):
    """A repository in the Hub's cache, laid out as its library does."""
    folder = tmp_path / "hub" / "hub" / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    for name, data in files.items():
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = folder / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return folder / "snapshots" / COMMIT


def test_nothing_is_here_yet(atlas):
    said = atlas("models")
    assert said.code == 0, said.err
    assert "smollm2  SmolLM2-135M-Instruct" in said.out
    assert "not fetched yet" in said.out


def test_what_both_caches_hold(atlas, tmp_path):
    folder = hub(tmp_path, "some/model", {"config.json": b"{}", "model.safetensors": b"x" * 100})
    smollm2 = json.loads(atlas("models", "--json").out)["catalogue"][0]
    assert smollm2["path"] is None
    place = tmp_path / "cache" / "atlas" / "models" / smollm2["sha256"] / smollm2["file"]
    place.parent.mkdir(parents=True)
    place.write_bytes(b"GGUF" * 500)
    said = atlas("models", "--json")
    found = json.loads(said.out)
    assert (found["catalogue"][0]["path"], found["catalogue"][0]["bytes"]) == (str(place), 2000)
    assert found["hub"] == [{"repo": "some/model", "revision": COMMIT, "path": str(folder), "bytes": 102}]
    assert found["caches"] == {"atlas": str(tmp_path / "cache" / "atlas"), "hub": str(tmp_path / "hub" / "hub")}
    text = atlas("models").out
    assert f"2.0 KiB at {place}" in text
    assert "some/model  aaaaaaaaaaaa  102 B" in text


def test_a_catalogue_model_may_lie_in_either_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub" / "hub"))
    assert cached.cached_entry(ENTRY, tmp_path) is None
    folder = hub(tmp_path, "some/toy", {"sub/toy.gguf": b"toy"})
    assert cached.cached_entry(ENTRY, tmp_path) == folder / "sub" / "toy.gguf"
    target = catalogue_target(ENTRY, tmp_path)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"toy")
    assert cached.cached_entry(ENTRY, tmp_path) == target


def test_the_path_that_a_name_stands_for(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub" / "hub"))
    folder = hub(tmp_path, "some/model", {"config.json": b"{}"})
    assert cached.cached_model("some/model", []) == folder
    assert cached.cached_model("some/model", [], "v9") is None
    assert cached.cached_model(str(tmp_path), []) == tmp_path
    assert cached.cached_model("toy", [ENTRY]) is None
    assert cached.cached_model("", []) is None
    assert cached.size_of(folder) == 2
