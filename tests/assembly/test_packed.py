"""A start with a packed image gives the text of one without, and one whose image cannot be used says so and makes another."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from atlas_core.assembly.engine import Ledger, build
from atlas_core.plugins import discover
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import CheckpointError, UsageError
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams

TINY = Path(__file__).parents[1] / "data/tiny/llama"
SIZES = {"hardware": "cpu", "max_batch_size": "1", "max_prefill_tokens": "16", "max_seq_len": "32"}
PROMPT = (5, 9, 2, 77)


@pytest.fixture
def model(tmp_path):
    shutil.copytree(TINY, tmp_path / "llama")
    return tmp_path / "llama"


def start(model, folder, **settings):
    """(phases that the ledger names, logits behind PROMPT)."""
    ledger = Ledger(lambda progress: None)
    given = {"model": str(model), **SIZES, **settings} | ({"packed_cache": str(folder)} if folder else {})
    built = build(read_settings(given, {}), discover(), ledger)
    try:
        scheduler = Scheduler(built.limits)
        scheduler.submit(Generate("a", PROMPT, SamplingParams(temperature=0, max_tokens=1)), seed=0, stop_ids=())
        ticket = built.runner.launch(scheduler.schedule())
        logits = np.array(built.runner.read_logits(ticket))
        built.runner.collect(ticket)
    finally:
        built.model.checkpoint.close()
        built.close()
    return [entry.phase for entry in ledger.entries], logits


def packing(phases):
    return [phase for phase in phases if phase.startswith("packed image")]


def test_the_second_start_reads_the_image_and_computes_the_same(model, tmp_path, monkeypatch):
    _, plain = start(model, None)
    first, logits = start(model, tmp_path / "images")
    assert packing(first) == ["packed image, since there was none"]
    (image,) = (tmp_path / "images").iterdir()
    written = image.stat().st_mtime_ns
    monkeypatch.setattr("atlas_core.assembly.model.Model.read", None)
    monkeypatch.setattr("atlas_core.assembly.model.Model.placed", None)
    second, again = start(model, tmp_path / "images")
    assert packing(second) == []
    assert image.stat().st_mtime_ns == written
    assert np.array_equal(logits, plain)
    assert np.array_equal(again, plain)


def test_an_image_that_cannot_be_used_is_named_and_made_anew(model, tmp_path, monkeypatch):
    folder = tmp_path / "images"
    _, plain = start(model, folder)
    (image,) = folder.iterdir()
    good = image.read_bytes()

    image.write_bytes(good[:-1] + bytes([good[-1] ^ 1]) if good[-1] else good[: len(good) // 2])
    phases, logits = start(model, folder)
    assert "damaged" in packing(phases)[0]
    assert np.array_equal(logits, plain)
    assert image.read_bytes() == good

    os.utime(model / "config.json", ns=(1, 1))
    phases, logits = start(model, folder)
    assert packing(phases)[0].endswith("was made for something else: what differs: checkpoint")
    assert np.array_equal(logits, plain)

    monkeypatch.setattr("atlas_core.kernels.library.KernelLibrary.digest", lambda library: "other binaries")
    phases, _ = start(model, folder)
    assert packing(phases)[0].endswith("what differs: kernels")
    assert list(folder.iterdir()) == [image]


def test_another_packing_has_another_image(model, tmp_path):
    start(model, tmp_path / "images")
    phases, _ = start(model, tmp_path / "images", transcode="bf16", numerics="fast")
    assert packing(phases) == ["packed image, since there was none"]
    assert len(list((tmp_path / "images").iterdir())) == 2


def test_a_folder_that_cannot_be_written_ends_the_start(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        start(model, tmp_path / "file")


def test_weights_that_are_made_up_are_not_kept(model, tmp_path):
    with pytest.raises(UsageError, match="dummy"):
        start(model, tmp_path, load_format="dummy")


def test_names_are_plain_whatever_the_folder_is_called(model, tmp_path):
    odd = tmp_path / "a model: ü*"
    model.rename(odd)
    phases, _ = start(odd, tmp_path / "images")
    assert packing(phases)
    (image,) = (tmp_path / "images").iterdir()
    assert image.name.startswith("a-model-")
    assert not set(image.name) & set(" :*/")
