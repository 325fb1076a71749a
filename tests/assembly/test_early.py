"""The disk begins with what the start will want: the tensors as they lie, or the one image there is."""

import shutil
import time
from pathlib import Path

import pytest

from atlas_core.assembly import early
from atlas_core.assembly.engine import Ledger, build
from atlas_core.assembly.packed import images
from atlas_core.loading.ahead import ReadAhead
from atlas_core.loading.extents import ExtentReader
from atlas_core.plugins import discover
from atlas_core.settings import read_settings

TINY = Path(__file__).parents[1] / "data/tiny/llama"
SIZES = {"hardware": "cpu", "max_batch_size": "1", "max_prefill_tokens": "16", "max_seq_len": "32"}


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


def test_the_images_of_one_checkpoint(model, tmp_path):
    class Checkpoint:
        path = model

    for name in ("llama-00000000-11111111.packed", "other.packed"):
        (tmp_path / name).touch()
    assert images(tmp_path, Checkpoint()) == []
    assert images(tmp_path / "none", Checkpoint()) == []
