"""What is read ahead is what the files hold; what cannot be given is left to who asks for it again."""

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.contracts.checkpoint import Extent
from atlas_core.loading import ahead as module
from atlas_core.loading.ahead import ReadAhead
from atlas_core.loading.extents import MARGIN, ExtentReader

BLOCK = 1 << 12
SIZE = 40 * BLOCK + 123


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    rng = np.random.default_rng(2)
    for name in "ab":
        (folder / name).write_bytes(rng.integers(0, 256, SIZE, np.uint8).tobytes())
    return [folder / "a", folder / "b"]


@pytest.fixture(autouse=True)
def cold(monkeypatch):
    """Small blocks, gaps that count, and a page cache that has nothing."""
    monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(module, "_GAP", 100)
    monkeypatch.setattr(ExtentReader, "resident", lambda reader, extent: False)


def taken(ahead, extent):
    into = memoryview(bytearray(extent.nbytes + MARGIN))
    return bytes(into[: extent.nbytes]) if ahead.take(extent, into) else None


def settled(ahead):
    """Once no more is being read."""
    while ahead.held < ahead._room and not all(block.done for block in ahead._blocks):
        time.sleep(0.001)
    return ahead


def wanted(extent):
    return extent.path.read_bytes()[extent.start : extent.start + extent.nbytes]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_whatever_is_given_is_what_the_file_holds(files, data):
    starts = sorted(data.draw(st.sets(st.integers(8, SIZE - 1), min_size=2, max_size=8)))
    ends = [data.draw(st.integers(a + 1, b)) for a, b in zip(starts, [*starts[1:], SIZE], strict=True)]
    extents = [Extent(path, a, b - a) for path in files for a, b in zip(starts, ends, strict=True)]
    ahead = ReadAhead(data.draw(st.permutations(extents)), data.draw(st.sampled_from([0, 32, 1000])))
    most = data.draw(st.sampled_from([100, BLOCK, 3 * BLOCK + 1]))
    for extent in extents:
        for start in range(extent.start, extent.start + extent.nbytes, most):
            part = Extent(extent.path, start, min(most, extent.start + extent.nbytes - start))
            assert taken(ahead, part) in {None, wanted(part)}
    ahead.close()


def test_all_of_it_is_given_once_where_there_is_room(files):
    parts = [Extent(path, start, 5000) for path in files for start in range(8, SIZE - 5000, 5000)]
    ahead = settled(ReadAhead(parts, 1000))
    assert [taken(ahead, part) for part in parts] == [wanted(part) for part in parts]
    assert taken(ahead, parts[0]) is None
    ahead.close()


def test_neighbours_in_one_block_may_come_in_any_order(files):
    ahead = settled(ReadAhead([Extent(files[0], 0, SIZE)], 1000))
    parts = [Extent(files[0], at, 6000) for at in range(100, 60_000, 6000)]
    for part in [*parts[::-1]]:
        assert taken(ahead, part) == wanted(part)
    assert ahead.held < 40
    ahead.close()
    assert ahead.held == 0


def test_a_file_that_begins_in_the_page_cache_is_read_behind_that(files, monkeypatch):
    monkeypatch.setattr(ExtentReader, "resident", lambda reader, extent: extent.start < 5 * BLOCK)
    ahead = settled(ReadAhead([Extent(files[0], 0, SIZE)], 1000))
    assert taken(ahead, Extent(files[0], 4 * BLOCK, BLOCK)) is None
    assert taken(ahead, Extent(files[0], 5 * BLOCK, BLOCK)) == wanted(Extent(files[0], 5 * BLOCK, BLOCK))
    ahead.close()


def test_what_is_in_the_page_cache_stays_there(files, monkeypatch):
    monkeypatch.setattr(ExtentReader, "resident", lambda reader, extent: extent.path == files[0])
    ahead = settled(ReadAhead([Extent(path, 0, SIZE) for path in files], 1000))
    assert ahead.covers(files[0])
    assert not ahead.covers(files[0].with_name("c"))
    assert taken(ahead, Extent(files[0], 0, 10)) is None
    assert taken(ahead, Extent(files[1], 0, 10)) == wanted(Extent(files[1], 0, 10))
    ahead.close()


def test_room_is_made_for_what_comes_next(files):
    """Every other block is asked for: those between are given up, and what was passed is not kept for ever."""
    ahead = ReadAhead([Extent(path, 0, SIZE) for path in files], 32)
    for path in files:
        for at in range(0, 40 * BLOCK, 2 * BLOCK):
            assert taken(settled(ahead), Extent(path, at, BLOCK)) == wanted(Extent(path, at, BLOCK))
    assert taken(ahead, Extent(files[0], BLOCK, BLOCK)) is None
    ahead.close()


@pytest.fixture
def slow(monkeypatch):
    """Reads wait for ``go``; ``begun`` counts them."""

    class Slow:
        go, begun = threading.Event(), threading.Semaphore(0)

    real = os.preadv

    def preadv(*arguments):
        Slow.begun.release()
        Slow.go.wait()
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    yield Slow
    Slow.go.set()


def test_a_reader_that_jumps_is_followed(files, slow):
    ahead = ReadAhead([Extent(path, 0, SIZE) for path in files], 32)
    last = Extent(files[1], 39 * BLOCK, BLOCK)
    threading.Timer(0.05, slow.go.set).start()
    assert taken(ahead, last) == wanted(last)
    assert taken(ahead, Extent(files[0], 0, BLOCK)) is None
    ahead.close()


def test_nothing_is_read_twice_by_readers_as_fast_as_the_disk(files, monkeypatch):
    """Eight of them in turn, with pieces that lie across blocks, as an upload has."""
    monkeypatch.setattr(module, "_THREADS", 2)
    monkeypatch.setattr(module, "_BEHIND", 100)  # a thread may be held up for long while others take blocks of 4 KiB
    parts = [Extent(path, at, BLOCK) for path in files for at in range(100, 39 * BLOCK, BLOCK)]
    ahead = ReadAhead(parts, 1000)
    turns, lock, got = iter(enumerate(parts)), threading.Lock(), {}

    def read():
        while True:
            with lock:
                index, part = next(turns, (None, None))
            if index is None:
                return
            got[index] = taken(ahead, part)

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [got[index] for index in range(len(parts))] == [wanted(part) for part in parts]
    assert ahead.held == 0
    ahead.close()


def test_readers_that_wait_are_let_go_at_the_end(files, slow):
    ahead = ReadAhead([Extent(files[0], 0, SIZE)], 32)
    for _ in range(8):
        slow.begun.acquire()
    found = []
    reader = threading.Thread(target=lambda: found.append(taken(ahead, Extent(files[0], 3 * BLOCK, 1))))
    reader.start()
    ender = threading.Thread(target=ahead.close)
    ender.start()
    reader.join()
    assert found == [None]
    slow.go.set()
    ender.join()


def test_what_turns_out_not_to_be_wanted_is_left_out(files, slow):
    ahead = ReadAhead([Extent(path, 0, SIZE) for path in files], 1000)
    for _ in range(8):
        slow.begun.acquire()
    kept = Extent(files[1], 9 * BLOCK + 5, 3 * BLOCK)
    ahead.restrict([kept, Extent(files[0].with_name("other"), 0, 10)])
    slow.go.set()
    assert settled(ahead).held == 8 + 4
    assert taken(ahead, kept) == wanted(kept)
    assert taken(ahead, Extent(files[1], 8 * BLOCK, BLOCK)) is None
    ahead.close()


def test_a_machine_with_little_memory_does_without(files):
    ahead = ReadAhead([Extent(files[0], 0, SIZE)], 31)
    assert taken(ahead, Extent(files[0], 0, 1)) is None
    ahead.close()


def test_a_file_that_ends_early_or_is_not_there_is_left_to_the_others(files):
    ahead = ReadAhead([Extent(files[0], 0, SIZE + 10 * BLOCK), Extent(files[0].with_name("gone"), 0, 10)], 1000)
    settled(ahead)
    assert taken(ahead, Extent(files[0], 0, BLOCK)) == wanted(Extent(files[0], 0, BLOCK))
    assert taken(ahead, Extent(files[0], SIZE, 10)) is None
    assert taken(ahead, Extent(files[0].with_name("gone"), 0, 10)) is None
    ahead.close()
