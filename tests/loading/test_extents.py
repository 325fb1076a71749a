"""Bytes of files arrive whole, through the page cache or past it, whatever the file system can do."""

import errno
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.contracts.checkpoint import Extent
from atlas_core.loading import extents
from atlas_core.loading.extents import MARGIN, ExtentReader
from atlas_core.vocab.errors import CheckpointError

SIZE = 3 * 4096 * 100 + 777


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("extents") / "weights"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8).tobytes())
    return path


@pytest.fixture(params=["cached", "direct", "buffered"])
def reader(request, monkeypatch, file):
    """Each way by itself: what the kernel says of its cache is not for a test to decide."""
    real = os.preadv

    def preadv(descriptor, buffers, offset, flags=0):
        if flags:
            if request.param == "buffered":
                raise OSError(errno.EOPNOTSUPP, "not here")
            if request.param == "direct":
                raise BlockingIOError(errno.EAGAIN, "not cached")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(extents, "_DIRECT_FROM", 1)
    made = ExtentReader()
    made.way = request.param
    yield made
    made.close()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_every_range_is_read_as_it_is(file, data):
    start = data.draw(st.integers(0, SIZE - 1))
    nbytes = data.draw(st.integers(1, min(SIZE - start, 300_000)))
    into = memoryview(mmap.mmap(-1, nbytes + MARGIN))
    reader = ExtentReader()
    begin = reader.read(Extent(file, start, nbytes), into)
    assert into[begin : begin + nbytes] == file.read_bytes()[start : start + nbytes]
    reader.close()


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, SIZE), (1, 4096), (4095, 4098), (SIZE - 1, 1), (8192, 8192), (777, SIZE - 777)]
)
def test_each_way_gives_the_same_bytes(reader, file, start, nbytes):
    into = memoryview(mmap.mmap(-1, nbytes + MARGIN))
    begin = reader.read(Extent(file, start, nbytes), into)
    assert into[begin : begin + nbytes] == file.read_bytes()[start : start + nbytes]
    assert reader.direct_bytes in (
        {0, nbytes} if reader.way == "direct" else {0}
    )  # 0: a file system without direct reads


def test_a_file_that_ends_early_is_named_with_both_positions(reader, file):
    into = memoryview(mmap.mmap(-1, 10_000 + MARGIN))
    with pytest.raises(CheckpointError, match=f"ended at byte .* while bytes up to {SIZE + 1000}"):
        reader.read(Extent(file, SIZE - 9000, 10_000), into)


def test_a_file_that_is_not_there_is_named(reader, file):
    with pytest.raises(CheckpointError, match="gone"):
        reader.read(Extent(file.with_name("gone"), 0, 1), memoryview(bytearray(1 + MARGIN)))
