"""Recurrent states that outlive their sequences, so that prompts of models that have them can be gone on with.

A state is one place in device memory for all recurrent layers, and means all tokens up to one position. A row reads one place and
writes one, so a snapshot costs no copy: the sequence leaves the place that it has written to the node of the prefix tree whose end it
stands for, and its next row reads that place and writes another.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct, field

from atlas_core.vocab.errors import EngineError


class Snapshot(Struct):
    """A kept state in ``place``, which the step ``born`` or one before it writes, and which step ``used`` was the last to need.

    ``holds`` rows that are not planned yet will read it; ``shared``: another sequence has gone on from it.
    """

    place: int
    born: int
    used: int
    holds: int = 0
    shared: bool = False


class Bearer(Protocol):
    """A node of the prefix tree: the end of a page."""

    snapshot: Snapshot | None


class Seat(Struct):
    """The places of a running sequence: its next row reads ``reads`` and writes ``writes``, which is the sequence's own.

    ``source`` has the snapshot that is to be read. ``parted`` is a position and the place of its state, until the tokens before it are
    known; ``rolling`` the last snapshot that was taken while the sequence decoded, if ``rolls``. ``spare`` places are given back once
    the next row is planned. ``known`` is what the device was told.
    """

    reads: int
    writes: int
    source: Bearer | None = None
    parted: tuple[int, int] | None = None
    rolls: bool = False
    rolling: Bearer | None = None
    spare: list[int] = field(default_factory=list)
    known: tuple[int, int] | None = None

    @property
    def own(self) -> list[int]:
        """Places that nobody else may have."""
        return [self.writes, *self.spare, *(self.parted or ())[1:]]


class Snapshots:
    """The places of recurrent states: one for each running sequence, all others for snapshots, those longest unused given away first.

    No place that a step reads or writes is given to another row of that step.
    """

    def __init__(self, places: int, rolling: int) -> None:
        """``rolling``: so many running sequences may have a snapshot that follows them while they decode."""
        self._places = places
        self._free = list(range(places - 1, -1, -1))
        self._returned: list[int] = []
        self._kept: OrderedDict[Bearer, None] = OrderedDict()
        self._rolling = rolling
        self._step = 0

    @property
    def kept(self) -> int:
        """Snapshots."""
        return len(self._kept)

    def begin_step(self) -> None:
        """A new step is planned."""
        self._step += 1
        self._free += self._returned
        self._returned.clear()

    def usable(self, node: Bearer) -> bool | None:
        """Whether a sequence can go on from ``node`` now; None when the step that is being planned makes its state."""
        if node.snapshot is None:
            return False
        return True if node.snapshot.born < self._step else None

    def take(self, node: Bearer | None) -> Seat | None:
        """A seat for a sequence that goes on from ``node``, or from nothing; None when there is no place now."""
        snapshot = None if node is None else node.snapshot
        if snapshot is not None:
            snapshot.holds += 1  # so that it is not given away for the place that goes on from it
        place = self._allocate()
        if place is None:
            if snapshot is not None:
                snapshot.holds -= 1
            return None
        if node is None or snapshot is None:
            return Seat(place, place)
        snapshot.shared = True
        self._kept.move_to_end(node)
        return Seat(snapshot.place, place, source=node)

    def planned(self, seat: Seat) -> None:
        """A row of the sequence was planned: what it reads, if that is not its own, is needed by this step only."""
        self._let_source_go(seat)
        self._returned += seat.spare
        seat.spare.clear()
        seat.reads = seat.writes

    def part(self, seat: Seat, position: int, *, decoding: bool) -> None:
        """Leave the place that the row planned last writes: it will be the state of ``position``. Nothing where no place is free."""
        if seat.parted is not None or (decoding and not self._may_roll(seat)):
            return
        place = self._allocate()
        if place is None:
            return
        seat.parted = position, seat.writes
        seat.writes = place

    def settle(self, seat: Seat, parted: tuple[int, int], nodes: Sequence[Bearer], page_tokens: int) -> None:
        """Give the state that was left (``seat.parted``) to its node, once ``nodes`` of full pages reach there."""
        position, place = parted
        if len(nodes) * page_tokens < position:
            return
        node = nodes[position // page_tokens - 1]
        seat.parted = None
        if node.snapshot is not None:
            if seat.reads == place:
                seat.spare.append(place)
            else:
                self._returned.append(place)
            return
        node.snapshot = Snapshot(place, self._step, self._step)
        self._kept[node] = None
        if seat.reads == place:
            node.snapshot.holds += 1
            seat.source = node
        if seat.rolls:
            last, seat.rolling = seat.rolling, node
            if last is not None and last.snapshot is not None and not last.snapshot.shared and not last.snapshot.holds:
                self.forget(last)

    def release(self, seat: Seat) -> None:
        """A sequence gives its place back."""
        self._let_source_go(seat)
        self._returned += seat.own
        self._rolling += seat.rolls

    def forget(self, node: Bearer) -> None:
        """Give a snapshot's place back, if ``node`` has one."""
        if node.snapshot is not None:
            self._returned.append(node.snapshot.place)
            node.snapshot = None
            del self._kept[node]

    def check_integrity(self, seats: Iterable[Seat], nodes: Iterable[Bearer]) -> None:
        """Compare with what sequences and the tree hold. Raises EngineError at the first difference."""
        seats = list(seats)
        if {node for node in nodes if node.snapshot is not None} != set(self._kept):
            raise EngineError("the list of snapshots is not the list of nodes that have one")
        holds = [sum(seat.source is node for seat in seats) for node in self._kept]
        snapshots = [node.snapshot for node in self._kept if node.snapshot is not None]
        if [snapshot.holds for snapshot in snapshots] != holds:
            raise EngineError("a snapshot is held for a row that nobody will plan, or the other way round")
        own = [place for seat in seats for place in seat.own]
        found = [*self._free, *self._returned, *own, *(snapshot.place for snapshot in snapshots)]
        if sorted(found) != list(range(self._places)):
            raise EngineError(f"places {sorted(found)} of states are known, and there are {self._places}")

    def _may_roll(self, seat: Seat) -> bool:
        if not seat.rolls and self._rolling:
            self._rolling -= 1
            seat.rolls = True
        return seat.rolls

    def _let_source_go(self, seat: Seat) -> None:
        if seat.source is not None and seat.source.snapshot is not None:
            seat.source.snapshot.holds -= 1
            seat.source.snapshot.used = self._step
        seat.source = None

    def _allocate(self) -> int | None:
        """A place that no row of this step reads or writes."""
        if self._free:
            return self._free.pop()
        for node in self._kept:
            snapshot = node.snapshot
            if snapshot is not None and not snapshot.holds and snapshot.used < self._step:
                node.snapshot = None
                del self._kept[node]
                return snapshot.place
        return None
