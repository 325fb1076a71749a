"""The disk begins with what the start will want: the tensors as they lie, or the one image there is."""

import shutil
import time
from pathlib import Path

import pytest

from atlas_core.assembly import early
from atlas_core.assembly.engine import Ledger, build
from atlas_core.assembly.prepare import prepare
from atlas_core.assembly.settings import encode_settings
from atlas_core.contracts.checkpoint import Extent
from atlas_core.loading.ahead import ReadAhead
from atlas_core.loading.extents import ExtentReader
from atlas_core.plugins import discover
from atlas_core.settings import read_settings

TINY = Path(__file__).parents[1] / "data/tiny/llama"
SIZES = {
    "start_cache": "none",
    "hardware": "cpu",
    "max_batch_size": "1",
    "max_prefill_tokens": "16",
    "max_seq_len": "32",
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model of which nothing is in the page cache."""
    monkeypatch.setattr(ExtentReader, "resident", lambda reader, extent: False)
    shutil.copytree(TINY, tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def seen(monkeypatch):
    """(files that a start began to read, bytes of weights that it found read)."""
    files, taken = set(), []

    class Watched(ReadAhead):
        def __init__(self, extents):
            listed = list(extents)
            files.update(extent.path for extent in listed)
            super().__init__(listed, 100)
            while not all(block.done for block in self._blocks):
                time.sleep(0.001)

        def take(self, extent, into):
            given = super().take(extent, into)
            taken.append(extent.nbytes * given)
            return given

    monkeypatch.setattr(early, "ReadAhead", Watched)

    def start(model, **settings):
        files.clear()
        taken.clear()
        built = build(
            read_settings({"model": str(model), **SIZES, **settings}, {}), discover(), Ledger(lambda progress: None)
        )
        built.model.checkpoint.close()
        built.close()
        return set(files), sum(taken)

    return start


def test_the_files_of_the_checkpoint(model, seen):
    files, nbytes = seen(model)
    assert files == {model / "model.safetensors"}
    assert nbytes > 0.5 * (model / "model.safetensors").stat().st_size


def test_the_image_once_there_is_one(model, tmp_path, seen):
    folder = tmp_path / "images"
    assert seen(model, packed_cache=str(folder))[0] == {model / "model.safetensors"}
    (image,) = folder.iterdir()
    files, nbytes = seen(model, packed_cache=str(folder))
    assert files == {image}
    assert nbytes > 0.9 * image.stat().st_size
    shutil.copy(image, image.with_name(image.name.replace(image.name[-15:-7], "0" * 8)))
    built = seen(model, packed_cache=str(folder))
    assert len(list(folder.iterdir())) == 2
    assert built == (set(), 0)


def test_nothing_of_weights_that_the_host_decodes(model, seen):
    assert seen(model, transcode="f32") == (set(), 0)


def files_of(ahead):
    return None if ahead is None else {block.extent.path for block in ahead._blocks}


@pytest.fixture
def guessed(monkeypatch):
    monkeypatch.setattr(early, "_LARGE", 1000)

    def files(path, **flags):
        ahead = early.guess(read_settings({"model": str(path), **flags}, {}))
        if ahead is not None:
            ahead.close()
        return files_of(ahead)

    return files


def test_what_is_guessed_from_the_path_alone(model, tmp_path, guessed):
    weights = model / "model.safetensors"
    assert guessed(model) == {weights}
    assert guessed(weights) == {weights}
    (model / "huge.bin").write_bytes(bytes(5000))
    assert guessed(model) == {weights}
    assert guessed(tmp_path / "elsewhere") is None
    assert guessed("some/hub-id") is None
    assert guessed(model, load_format="dummy") is None
    assert guessed(model, transcode="bf16") is None
    image = tmp_path / f"{early.image_stem(model)}-01234567.packed"
    assert guessed(model, packed_cache=str(tmp_path)) == {weights}
    image.write_bytes(bytes(5000))
    assert guessed(model, packed_cache=str(tmp_path)) == {image}
    weights.unlink()
    assert guessed(model) == {model / "huge.bin", *(f for f in model.iterdir() if f.stat().st_size >= 1000)}


@pytest.mark.parametrize("same", [True, False])
def test_an_engine_goes_on_with_the_guess_it_was_prepared_with(model, monkeypatch, same):
    monkeypatch.setattr(early, "_LARGE", 1000)
    made = []

    class Watched(ReadAhead):
        def __init__(self, extents):
            super().__init__(extents, 100)
            made.append(self)

    monkeypatch.setattr(early, "ReadAhead", Watched)
    settings = read_settings({"model": str(model), **SIZES}, {})
    other = read_settings({"model": str(model), **SIZES, "max_seq_len": "16"}, {})
    build_ = prepare(encode_settings(settings))
    (first,) = made
    assert files_of(first) == {model / "model.safetensors"}
    build_(encode_settings(settings if same else other), lambda progress: None).close()
    assert len(made) == (1 if same else 2)
    assert all(ahead._closed and not ahead.held for ahead in made)


def test_a_guess_that_lacks_a_file_is_given_up(model, monkeypatch):
    wrong = ReadAhead([Extent(TINY / "model.safetensors", 0, 100)], 100)
    settings = read_settings({"model": str(model), **SIZES}, {})
    built = build(settings, discover(), Ledger(lambda progress: None), wrong)
    built.model.checkpoint.close()
    built.close()
    assert wrong._closed


def test_nothing_is_found_out_where_all_is_in_the_page_cache(model, monkeypatch):
    monkeypatch.setattr(ExtentReader, "resident", lambda reader, extent: True)
    cached = ReadAhead([Extent(model / "model.safetensors", 0, 5000)], 100)
    assert early.begin_reading(None, None, cached) is cached
    cached.close()
