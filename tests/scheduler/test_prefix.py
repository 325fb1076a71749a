import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from atlas_core.scheduler.prefix import PageStore
from atlas_core.vocab.errors import EngineError

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class Reader:
    """A sequence as far as pages go."""

    def __init__(self, space, tokens, chain, pages, computed):
        self.space, self.tokens, self.chain, self.pages, self.computed = space, tokens, chain, pages, computed
        self.standing = []  # the prefixes that it stands on

    def prefix(self, pages):
        return self.space, tuple(self.tokens[: pages * SIZE])


class PageStoreMachine(RuleBasedStateMachine):
    """The store against a plain model: a set of prefixes, each with the stamp of its last use while nobody uses it."""

    readers = Bundle("readers")

    @initialize(groups=st.integers(1, 2), extra=st.integers(0, 8))
    def build(self, groups, extra):
        self.counts = [6 + group * extra for group in range(groups)]
        self.store = PageStore(self.counts, SIZE, keep=True)
        self.live = []
        self.kept = {}  # prefix -> born
        self.stamps = {}  # idle prefix -> stamp
        self.clock = self.step = self.evicted = 0

    def users(self, prefix):
        return sum(prefix in reader.standing for reader in self.live)

    def free(self):
        """Pages that hold nothing, in the smallest group."""
        own = sum(len(reader.pages[0]) for reader in self.live)
        shared = sum(len(set(self.holders(prefix))) for prefix in self.kept)
        return self.counts[0] - len(self.kept) - own + shared

    def holders(self, prefix):
        """Readers whose block tables have the kept page of a prefix."""
        page = self.pages[prefix][0]
        return [index for index, reader in enumerate(self.live) if page in reader.pages[0]]

    @property
    def pages(self):
        found, waiting = {}, [(space, (), root) for space, root in self.store._roots.items()]
        while waiting:
            space, before, node = waiting.pop()
            for child in node.children.values():
                tokens = (*before, *memoryview(child.key).cast("i"))
                found[space, tokens] = child.pages
                waiting.append((space, tokens, child))
        return found

    @rule(target=readers, space=st.sampled_from(["", "b"]), tokens=TOKENS, limited=st.integers(0, 10))
    def start(self, space, tokens, limited):
        most = min(len(tokens) - 1, limited)
        match = self.store.match(space, tokens, most)
        want, soon = 0, False
        while (want + 1) * SIZE <= most and (space, tuple(tokens[: (want + 1) * SIZE])) in self.kept:
            if self.kept[space, tuple(tokens[: (want + 1) * SIZE])] == self.step:
                soon = True
                break
            want += 1
        want = 0 if soon else want
        prefixes = [(space, tuple(tokens[: (i + 1) * SIZE])) for i in range(want)]
        assert (len(match.nodes), match.soon) == (want, soon)
        assert [node.pages for node in match.nodes] == [self.pages[prefix] for prefix in prefixes]
        assert match.idle == sum(not self.users(prefix) for prefix in prefixes)
        need = -(-len(tokens) // SIZE) - want
        if soon or self.store.available - match.idle < need:
            return None
        for prefix in prefixes:
            self.stamps.pop(prefix, None)
        shared = [self.pages[prefix] for prefix in prefixes]
        before = self.pages
        gone = self.expect_gone(need, [page for (page, *_) in shared])
        chain, pages = self.store.take(space, match, need)
        assert set(before) - set(self.pages) == gone
        assert [[own[i] for own in pages] for i in range(want)] == [list(page) for page in shared]
        reader = Reader(space, list(tokens), chain, pages, want * SIZE)
        reader.standing = prefixes
        self.live.append(reader)
        return reader

    def expect_gone(self, need, pinned):
        free = self.free()
        order = sorted(self.stamps, key=self.stamps.get)
        gone = order[: max(0, need - free)]
        for prefix in gone:
            del self.stamps[prefix], self.kept[prefix]
        self.evicted += len(gone)
        return set(gone)

    @rule(reader=readers, count=st.integers(1, 4))
    def compute(self, reader, count):
        """The step at hand computes more of a sequence's tokens."""
        if reader not in self.live:
            return
        reader.computed = min(len(reader.tokens), reader.computed + count)
        full = reader.computed // SIZE
        for index in range(len(reader.standing), full):
            prefix = reader.prefix(index + 1)
            self.kept.setdefault(prefix, self.step)
            self.stamps.pop(prefix, None)
            reader.standing.append(prefix)
        self.store.share(reader.chain, reader.tokens, reader.pages, reader.computed)

    @rule(reader=readers, token=st.integers(0, 1))
    def grow(self, reader, token):
        if reader not in self.live:
            return
        need = -(-(len(reader.tokens) + 1) // SIZE) - len(reader.pages[0])
        if self.store.available < need:
            return
        before = self.pages
        gone = self.expect_gone(need, [])
        for own, more in zip(reader.pages, self.store.allocate(need), strict=True):
            own.extend(more)
        assert set(before) - set(self.pages) == gone
        reader.tokens.append(token)

    @rule(reader=consumes(readers))
    def leave(self, reader):
        if reader not in self.live:
            return
        self.live.remove(reader)
        self.store.release(reader.chain, reader.pages)
        for prefix in reversed(reader.standing):
            if not self.users(prefix):
                self.clock += 1
                self.stamps[prefix] = self.clock

    @rule()
    def begin_step(self):
        self.step += 1
        self.store.begin_step()

    @invariant()
    def agrees(self):
        self.store.check_integrity((reader.chain, reader.pages) for reader in self.live)
        assert set(self.pages) == set(self.kept)
        assert self.store.kept == len(self.stamps)
        assert self.store.evicted == self.evicted
        assert self.store.available == self.free() + len(self.stamps)
        for prefix in self.kept:
            assert len(prefix[1]) == SIZE or (prefix[0], prefix[1][:-SIZE]) in self.kept


TestPageStore = PageStoreMachine.TestCase
TestPageStore.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def read(store, tokens, space=""):
    """A sequence that computes all of ``tokens`` in one step and ends; returns how many it found."""
    store.begin_step()
    match = store.match(space, tokens, len(tokens) - 1)
    chain, pages = store.take(space, match, -(-len(tokens) // SIZE) - len(match.nodes))
    store.share(chain, tokens, pages, len(tokens))
    store.release(chain, pages)
    return len(match.nodes) * SIZE


def test_the_last_token_is_always_computed():
    store = PageStore([8], SIZE, keep=True)
    assert read(store, [1, 2, 3, 4]) == 0
    assert read(store, [1, 2, 3, 4]) == 2
    assert read(store, [1, 2, 3, 4, 5]) == 4


def test_name_spaces_share_nothing():
    store = PageStore([8], SIZE, keep=True)
    read(store, [1, 2, 3], "a")
    assert (read(store, [1, 2, 3], "b"), read(store, [1, 2, 3], "a")) == (0, 2)


def test_of_one_prompt_the_last_pages_go_first_and_of_two_the_older_one():
    store = PageStore([4], SIZE, keep=True)
    read(store, [1, 2, 3, 4, 5])
    read(store, [6, 7, 8])
    assert (store.kept, store.available) == (3, 4)
    read(store, [9, 9, 9])  # takes the free page, and one that is kept
    assert store.evicted == 1
    assert store.match("", [1, 2, 3, 4, 5], 4).nodes == store.match("", [1, 2, 0], 2).nodes != []
    assert len(store.match("", [6, 7, 8], 2).nodes) == 1


def test_who_is_used_again_stays_longer():
    store = PageStore([3], SIZE, keep=True)
    read(store, [1, 1, 0])
    read(store, [2, 2, 0])
    read(store, [1, 1, 5])
    read(store, [3, 3, 0])
    store.begin_step()
    assert [len(store.match("", [n, n, 0], 2).nodes) for n in (1, 2, 3)] == [1, 0, 1]


def test_a_page_of_the_same_tokens_is_kept_once():
    store = PageStore([8], SIZE, keep=True)
    store.begin_step()
    sequences = []
    for _ in range(2):  # neither sees the other, as when both are asked for all log-probabilities of their prompts
        chain, pages = store.take("", store.match("", [1, 2, 3], 0), 2)
        sequences.append((chain, pages))
        store.share(chain, [1, 2, 3], pages, 3)
    store.check_integrity(sequences)
    assert store.used == 4
    for chain, pages in sequences:
        store.release(chain, pages)
    assert (store.used, store.kept, store.available) == (0, 1, 8)


def test_nothing_is_kept_when_nothing_shall_be():
    store = PageStore([4], SIZE, keep=False)
    assert [read(store, [1, 2, 3, 4, 5]) for _ in range(2)] == [0, 0]
    assert (store.kept, store.available) == (0, 4)


def test_integrity_finds_who_was_forgotten():
    store = PageStore([4], SIZE, keep=True)
    store.begin_step()
    chain, pages = store.take("", store.match("", [1, 2, 3], 2), 2)
    store.share(chain, [1, 2, 3], pages, 3)
    with pytest.raises(EngineError, match="users of a kept page"):
        store.check_integrity([])
    store.check_integrity([(chain, pages)])
    with pytest.raises(EngineError, match="4 pages were asked for"):
        store.allocate(4)
