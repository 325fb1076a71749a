from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atlas_core.scheduler.snapshots import Snapshots


class Node:
    """The end of what ``tokens`` are."""

    def __init__(self, tokens):
        self.tokens, self.snapshot = tokens, None


class Sequence:
    def __init__(self, seat, tokens):
        self.seat, self.tokens, self.known = seat, tokens, tokens
        self.planned = False


class SnapshotsMachine(RuleBasedStateMachine):
    """Sequences whose rows read and write places; a place holds the tokens that its state stands for.

    Rows of one step run at once: none may touch what another writes, and all see what the steps before have left.
    """

    @initialize(slots=st.integers(1, 3), snapshots=st.integers(1, 4))
    def build(self, slots, snapshots):
        self.slots, self.places = slots, slots + snapshots
        self.store = Snapshots(self.places, 1)
        self.states = [None] * self.places
        self.live, self.nodes = [], {}
        self.reads, self.writes = {}, {}
        self.store.begin_step()

    @rule()
    def next_step(self):
        for sequence, place in self.writes.items():
            others = [o for o in self.live if o is not sequence]
            assert place not in [self.writes.get(o) for o in others], "a place is written once a step"
            assert place not in [self.reads.get(o) for o in others], "nobody reads what another writes"
        for sequence, place in self.writes.items():
            self.states[place] = sequence.tokens
            sequence.planned = False
        self.reads, self.writes = {}, {}
        self.store.begin_step()

    @precondition(lambda self: len(self.live) < self.slots)
    @rule(data=st.data())
    def start(self, data):
        usable = [node for node in self.nodes.values() if self.store.usable(node)]
        node = data.draw(st.sampled_from([None, *usable]))
        seat = self.store.take(node)
        if seat is None:
            return
        sequence = Sequence(seat, () if node is None else node.tokens)
        self.live.append(sequence)
        self.row(sequence, data.draw(st.integers(0, 1)))  # whoever starts has a row at once

    @rule(
        data=st.data(), token=st.integers(0, 1), part=st.sampled_from(["no", "prompt", "decoding"]), now=st.booleans()
    )
    def go_on(self, data, token, part, now):
        waiting = [sequence for sequence in self.live if not sequence.planned]
        if not waiting:
            return
        sequence = data.draw(st.sampled_from(waiting))
        self.row(sequence, token)
        if part != "no":
            self.store.part(sequence.seat, len(sequence.tokens), decoding=part == "decoding")
        if now:
            self.learn(sequence)

    def row(self, sequence, token):
        seat = sequence.seat
        if sequence.tokens:
            assert self.states[seat.reads] == sequence.tokens
            self.reads[sequence] = seat.reads
        sequence.tokens = (*sequence.tokens, token)
        self.writes[sequence] = seat.writes
        sequence.planned = True
        if seat.reads != seat.writes:
            self.store.planned(seat)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def tokens_become_known(self, data):
        self.learn(data.draw(st.sampled_from(self.live)))

    def learn(self, sequence):
        sequence.known = sequence.tokens
        if sequence.seat.parted is not None:
            prefixes = [sequence.known[: n + 1] for n in range(len(sequence.known))]
            nodes = [self.nodes.setdefault(prefix, Node(prefix)) for prefix in prefixes]
            self.store.settle(sequence.seat, sequence.seat.parted, nodes, 1)

    @rule(data=st.data())
    def leave(self, data):
        gone = [sequence for sequence in self.live if not sequence.planned]
        if gone:
            sequence = data.draw(st.sampled_from(gone))
            self.live.remove(sequence)
            self.store.release(sequence.seat)

    @rule(data=st.data())
    def pages_are_given_away(self, data):
        pinned = [sequence.seat.source for sequence in self.live]
        leaves = [node for node in self.nodes.values() if node not in pinned]
        if leaves:
            node = data.draw(st.sampled_from(leaves))
            self.store.forget(node)
            del self.nodes[node.tokens]

    @invariant()
    def nothing_is_lost(self):
        self.store.check_integrity((sequence.seat for sequence in self.live), self.nodes.values())
        for node in self.nodes.values():
            if self.store.usable(node):
                assert self.states[node.snapshot.place] == node.tokens


TestSnapshots = SnapshotsMachine.TestCase
TestSnapshots.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


def test_a_snapshot_follows_who_decodes_unless_somebody_went_on_from_it():
    store = Snapshots(8, 1)
    store.begin_step()
    seat = store.take(None)
    nodes = [Node(n) for n in range(4)]
    for count in (1, 2, 3, 4):
        store.part(seat, count, decoding=True)
        store.settle(seat, seat.parted, nodes[:count], 1)
        store.begin_step()
        store.planned(seat)
        if count == 2:
            other = store.take(nodes[1])
            store.planned(other)
    assert [node.snapshot is not None for node in nodes] == [False, True, False, True]


def test_so_many_may_have_one_that_follows_them():
    store = Snapshots(8, 1)
    store.begin_step()
    first, second = store.take(None), store.take(None)
    for seat in (first, second):
        store.part(seat, 1, decoding=True)
    assert [seat.parted is not None for seat in (first, second)] == [True, False]
    store.part(second, 1, decoding=False)
    assert second.parted is not None
    store.release(first)
    third = store.take(None)
    store.part(third, 1, decoding=True)
    assert third.parted is not None


def test_a_state_that_is_still_to_be_read_is_not_given_away():
    store = Snapshots(3, 1)
    store.begin_step()
    first, second, node = store.take(None), store.take(None), Node((1,))
    store.part(first, 1, decoding=False)
    store.settle(first, first.parted, [node], 1)
    store.begin_step()
    store.part(second, 2, decoding=False)
    assert second.parted is None, "the first one's next row will read it"
    store.planned(first)
    store.part(second, 2, decoding=False)
    assert second.parted is None, "a row of this step reads it"
    store.begin_step()
    store.part(second, 2, decoding=False)
    assert (second.parted is None, node.snapshot) == (False, None)


def test_what_is_forgotten_is_free_in_the_next_step():
    store = Snapshots(4, 1)
    store.begin_step()
    seat, nodes = store.take(None), [Node((1,)), Node((1, 2))]
    store.part(seat, 1, decoding=True)
    store.settle(seat, seat.parted, nodes[:1], 1)
    store.begin_step()
    store.planned(seat)  # reads what the first node has
    store.part(seat, 2, decoding=True)
    store.settle(seat, seat.parted, nodes, 1)
    assert nodes[0].snapshot is None
    assert [store.take(None) is None for _ in range(2)] == [False, True]
    store.begin_step()
    assert store.take(None) is not None
