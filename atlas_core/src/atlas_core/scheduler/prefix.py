"""Pages that outlive their sequences, so that prompts that begin alike are computed once.

A tree for each name space: every node is one full page of each cache group, below the page before it, under the tokens that it
holds. Children are found by the tokens themselves, so two prompts can never be taken for one another. Only full pages stand in
the tree and nothing writes a full page again, so all sharing is reading.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from atlas_core.scheduler.blocks import BlockPool
from atlas_core.scheduler.snapshots import Snapshot, Snapshots
from atlas_core.vocab.errors import EngineError


class Node:
    """A full page of each group, below the one before it (the root of a name space has none).

    ``users`` sequences stand on it or below it. ``born`` is the step that computes it: steps after that one may read it. ``snapshot`` is
    the recurrent state at its end, where one is kept.
    """

    __slots__ = ("born", "children", "key", "pages", "parent", "snapshot", "users")

    def __init__(self, parent: "Node | None", key: bytes | str, pages: tuple[int, ...], born: int) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.born = born
        self.users = 0
        self.snapshot: Snapshot | None = None
        self.children: dict[bytes, Node] = {}


class Chain(Struct):
    """Where a sequence stands in the tree of its name space: ``nodes`` are those of its full pages, the first page's first."""

    space: str
    nodes: list[Node] = field(default_factory=list)


class Match(NamedTuple):
    """Pages that a prompt need not compute, ``idle`` of which nobody uses.

    ``soon``: there are more, but the step that is being planned computes them. ``alike`` pages are there, but what ends the last of
    them has no recurrent state, where one is needed.
    """

    nodes: list[Node]
    idle: int
    soon: bool
    alike: int


class PageStore:
    """The pages of all cache groups: those of sequences, and those that are kept in case that somebody needs them again.

    Kept pages count as free: they are given away when there are no others, those that nobody has used for the longest time
    first, and of one prompt the last ones first. Without ``keep`` nothing is kept or shared. With ``snapshots`` a prompt can be gone on
    with only where one is. ``evicted`` counts kept pages that were given away, in every group once.
    """

    def __init__(
        self, pages: Sequence[int], page_tokens: int, *, keep: bool, snapshots: Snapshots | None = None
    ) -> None:
        self.evicted = 0
        self._pools = tuple(BlockPool(count) for count in pages)
        self._size = page_tokens
        self._keep = keep
        self._snapshots = snapshots
        self._roots: dict[str, Node] = {}
        # A node is used wherever one below it is. So whoever becomes idle does so after, or with, all that stand below it, and
        # stands behind them here: the first one is always a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._step = 0

    @property
    def available(self) -> int:
        """Pages of each group that can be had."""
        return min(pool.free for pool in self._pools) + len(self._idle)

    @property
    def kept(self) -> int:
        """Pages of each group that nobody uses and that hold something."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Pages that sequences use, in the group where those are the most."""
        return max(pool.pages - pool.free for pool in self._pools) - len(self._idle)

    def begin_step(self) -> None:
        """A new step is planned: what the steps before it compute may be read."""
        self._step += 1

    def match(self, space: str, tokens: Sequence[int], most: int) -> Match:
        """The kept or shared pages with which ``tokens`` begin, of at most the first ``most`` tokens."""
        found: list[Node] = []
        node = self._roots.get(space)
        for start in range(0, most - self._size + 1, self._size):
            node = None if node is None else node.children.get(self._key(tokens, start))
            if node is None:
                break
            if node.born == self._step:
                return Match([], 0, soon=True, alike=0)
            found.append(node)
        alike = len(found)
        while self._snapshots is not None and found:
            usable = self._snapshots.usable(found[-1])
            if usable is None:
                return Match([], 0, soon=True, alike=0)
            if usable:
                break
            found.pop()
        return Match(found, sum(not node.users for node in found), soon=False, alike=alike)

    def take(self, space: str, match: Match, count: int) -> tuple[Chain, list[list[int]]]:
        """A chain that stands where ``match`` ends, and the pages of its sequence in each group: the matched ones and ``count`` more.

        Raises EngineError when there are fewer; the caller asks ``available`` first, to which the idle ones of the match do not count.
        """
        chain = Chain(space)
        for node in match.nodes:
            self._enter(chain, node)
            for pool, page in zip(self._pools, node.pages, strict=True):
                pool.share(page)
        pages = self.allocate(count)
        return chain, [[node.pages[group] for node in match.nodes] + more for group, more in enumerate(pages)]

    def allocate(self, count: int) -> list[list[int]]:
        """``count`` new pages of each group. Raises EngineError when there are fewer; the caller asks ``available`` first."""
        while self._idle and any(pool.free < count for pool in self._pools):
            self._evict()
        return [pool.allocate(count) for pool in self._pools]

    def share(self, chain: Chain, tokens: Sequence[int], pages: Sequence[Sequence[int]], count: int) -> None:
        """Let others use a sequence's full pages among the first ``count`` tokens, which are known and launched steps compute.

        Where somebody else was faster, the sequence keeps its own page and goes on below the other's.
        """
        if not self._keep:
            return
        for index in range(len(chain.nodes), count // self._size):
            parent = chain.nodes[-1] if chain.nodes else self._root(chain.space)
            key = self._key(tokens, index * self._size)
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = Node(parent, key, tuple(own[index] for own in pages), self._step)
                for pool, page in zip(self._pools, node.pages, strict=True):
                    pool.share(page)
                node.users = 1
                chain.nodes.append(node)
            else:
                self._enter(chain, node)

    def release(self, chain: Chain, pages: Sequence[Iterable[int]]) -> None:
        """A sequence gives its place back; what it shared is kept."""
        for pool, own in zip(self._pools, pages, strict=True):
            pool.release(own)
        for node in reversed(chain.nodes):
            node.users -= 1
            if not node.users:
                self._idle[node] = None
        chain.nodes.clear()

    def check_integrity(self, holders: Iterable[tuple[Chain, Sequence[Iterable[int]]]]) -> None:
        """Compare with the chains and pages of all sequences. Raises EngineError at the first difference."""
        holders = list(holders)
        users: dict[Node, int] = {}
        for chain, _ in holders:
            for node in chain.nodes:
                users[node] = users.get(node, 0) + 1
        nodes = list(self.nodes())
        if any(node.users != users.get(node, 0) for node in nodes) or not users.keys() <= set(nodes):
            raise EngineError("the users of a kept page are not the sequences that stand on it")
        if {node for node in nodes if not node.users} != set(self._idle):
            raise EngineError("the list of idle pages is not the list of pages without a user")
        order = {node: place for place, node in enumerate(self._idle)}
        if any(
            child not in order or order[child] > place
            for node, place in order.items()
            for child in node.children.values()
        ):
            raise EngineError("an idle page would be given away before one that stands on it")
        for group, pool in enumerate(self._pools):
            held = [page for _, pages in holders for page in pages[group]]
            pool.check_integrity([*held, *(node.pages[group] for node in nodes)])

    def nodes(self) -> Iterable[Node]:
        """Every node but the roots."""
        waiting = list(self._roots.values())
        while waiting:
            below = waiting.pop().children.values()
            yield from below
            waiting += below

    def _root(self, space: str) -> Node:
        return self._roots.setdefault(space, Node(None, space, (), -1))

    def _key(self, tokens: Sequence[int], start: int) -> bytes:
        """The tokens of one page, int32."""
        return array("i", tokens[start : start + self._size]).tobytes()

    def _enter(self, chain: Chain, node: Node) -> None:
        if not node.users:
            del self._idle[node]
        node.users += 1
        chain.nodes.append(node)

    def _evict(self) -> None:
        """Forget the idle page that was used the longest time ago."""
        node, _ = self._idle.popitem(last=False)
        parent = node.parent
        if node.children or parent is None or not isinstance(node.key, bytes):
            raise EngineError("a page is forgotten that others stand on")
        del parent.children[node.key]
        if parent.parent is None and not parent.children and isinstance(parent.key, str):
            del self._roots[parent.key]
        for pool, page in zip(self._pools, node.pages, strict=True):
            pool.release((page,))
        if self._snapshots is not None:
            self._snapshots.forget(node)
        self.evicted += 1
