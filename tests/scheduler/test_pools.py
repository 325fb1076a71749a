import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from atlas_core.scheduler.blocks import BlockPool
from atlas_core.scheduler.ranges import RangePool
from atlas_core.vocab.errors import EngineError


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders take, share and give back pages; the pool agrees with a plain count all the time."""

    holders = Bundle("holders")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7)
        self.held = []

    @rule(target=holders, count=st.integers(0, 7))
    def allocate(self, count):
        if count > self.pool.free:
            with pytest.raises(EngineError):
                self.pool.allocate(count)
            return []
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & {page for pages in self.held for page in pages}
        self.held.append(pages)
        return pages

    @rule(target=holders, pages=holders)
    def share(self, pages):
        if not any(pages is held for held in self.held):
            return []
        for page in pages:
            self.pool.share(page)
        copy = list(pages)
        self.held.append(copy)
        return copy

    @rule(pages=consumes(holders))
    def release(self, pages):
        place = next((i for i, held in enumerate(self.held) if held is pages), None)
        if place is not None:
            self.pool.release(self.held.pop(place))

    @precondition(lambda self: self.pool.free)
    @rule()
    def release_of_a_free_page_is_refused(self):
        page = next(iter(set(range(7)) - {page for pages in self.held for page in pages}))
        with pytest.raises(EngineError, match=f"page {page}"):
            self.pool.release([page])
        with pytest.raises(EngineError, match=f"page {page}"):
            self.pool.share(page)

    @invariant()
    def agrees(self):
        pages = [page for pages in self.held for page in pages]
        self.pool.check_integrity(pages)
        assert self.pool.free == 7 - len(set(pages))


TestBlockPool = BlockPoolMachine.TestCase


def test_integrity_finds_a_page_that_somebody_forgot():
    pool = BlockPool(3)
    pages = pool.allocate(2)
    with pytest.raises(EngineError, match="references and 0 holders"):
        pool.check_integrity(pages[:1])


class RangePoolMachine(RuleBasedStateMachine):
    """Runs never overlap, and a run is refused only when no gap is long enough."""

    runs = Bundle("runs")

    def __init__(self):
        super().__init__()
        self.pool = RangePool(10)
        self.held = []

    def taken(self):
        return {unit for start, count in self.held for unit in range(start, start + count)}

    @rule(target=runs, count=st.integers(1, 11))
    def allocate(self, count):
        taken = self.taken()
        fits = [s for s in range(10 - count + 1) if not taken & set(range(s, s + count))]
        start = self.pool.allocate(count)
        assert start == (fits[0] if fits else None)
        if start is None:
            return None
        self.held.append((start, count))
        return start, count

    @rule(run=consumes(runs))
    def release(self, run):
        if run is not None:
            self.pool.release(*run)
            self.held.remove(run)

    @invariant()
    def agrees(self):
        self.pool.check_integrity(self.held)
        assert self.pool.used == len(self.taken())


TestRangePool = RangePoolMachine.TestCase


def test_a_run_is_given_back_whole():
    pool = RangePool(4)
    pool.allocate(3)
    with pytest.raises(EngineError, match="not handed out as one run"):
        pool.release(0, 2)
    with pytest.raises(EngineError, match="are handed out"):
        pool.check_integrity([(0, 2)])
