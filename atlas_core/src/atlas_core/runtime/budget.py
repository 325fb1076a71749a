"""The memory plan: every term by name, one hard limit, decided from plain numbers before weights are read."""

from collections.abc import Sequence

from msgspec import Struct

from atlas_core.vocab.errors import BudgetError

GIB = 1 << 30


class Readings(Struct, frozen=True):
    """What the machine says of its memory, in bytes.

    On a device of unified memory ``device_free`` and the kernel's MemFree count the page cache as used; what can be had is
    ``host_available`` (MemAvailable). A device with memory of its own has what ``device_free`` says.
    """

    total: int
    device_free: int
    host_available: int
    unified: bool

    @property
    def available(self) -> int:
        """Bytes that can be allocated without hurting anybody."""
        return self.host_available if self.unified else self.device_free


class Term(Struct, frozen=True):
    """One use of memory that is known before the KV pages; ``cure`` says how to make it smaller, if a person can."""

    name: str
    nbytes: int
    cure: str = ""


class KVNeed(Struct, frozen=True):
    """Pages of ``page_bytes`` (all cache groups and layers) hold ``page_tokens`` positions.

    ``max_seq_len`` is the longest sequence wanted; ``fixed`` that a person asked for it, so that it must not shrink.
    ``explicit_bytes`` is a size of the pool that a person asked for: it passes the same check as everything else.
    """

    page_bytes: int
    page_tokens: int
    max_seq_len: int
    fixed: bool = False
    explicit_bytes: int | None = None


class Budget(Struct, frozen=True):
    """The plan: ``terms`` with the KV pages among them sum up to at most ``limit``.

    ``max_seq_len`` is smaller than what was wanted when the pages do not hold more; ``notes`` say so.
    """

    terms: tuple[Term, ...]
    limit: int
    available: int
    pages: int
    tokens: int
    max_seq_len: int
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """One line a term, the limit and what is available; GiB with two decimals."""
        return _table(self.terms, self.limit, self.available)


def plan_budget(readings: Readings, fraction: float, terms: Sequence[Term], kv: KVNeed) -> Budget:
    """Decide how many KV pages there are: floor(rest / page bytes), the rest being limit minus terms.

    The limit is ``fraction`` of the total memory and must be available. Raises BudgetError with the table and the term to
    lower when the limit is not available, the terms exceed it, or the pages do not hold the sequence that was asked for.
    """
    if not 0 < fraction <= 1:
        raise BudgetError(
            f"{fraction} of the memory is asked for", "it must be above 0 and at most 1", "choose such a fraction"
        )
    limit = int(readings.total * fraction)
    available = readings.available
    if kv.explicit_bytes is not None:
        shown = (*terms, Term("KV pages", kv.explicit_bytes, "ask for fewer KV bytes"))
    else:
        shown = (*terms, Term("KV pages", kv.page_bytes, ""))
    table = _table(shown, limit, available)
    if limit > available:
        raise BudgetError(
            f"the memory limit of {_gib(limit)} is not available: {_gib(available)} is", table,
            f"end other programs, or lower --memory to {available >> 20}MiB at most",
        )  # fmt: skip
    needed = sum(term.nbytes for term in shown)
    if needed > limit:
        raise BudgetError(f"the memory plan needs {_gib(needed)} and the limit is {_gib(limit)}", table, _cure(shown))
    room = kv.explicit_bytes if kv.explicit_bytes is not None else limit - sum(term.nbytes for term in terms)
    pages = room // kv.page_bytes
    tokens = pages * kv.page_tokens
    max_seq_len = kv.max_seq_len
    notes: tuple[str, ...] = ()
    if tokens < kv.max_seq_len:
        if kv.fixed or not tokens:
            raise BudgetError(
                f"KV pages for {tokens} tokens are left, and a sequence of {kv.max_seq_len} is asked for", table,
                f"lower --max-seq-len to {tokens} at most, or: {_cure(terms)}",
            )  # fmt: skip
        max_seq_len = tokens
        notes = (f"sequences are limited to {tokens} tokens instead of {kv.max_seq_len}: no more KV pages fit",)
    planned = (*terms, Term("KV pages", pages * kv.page_bytes))
    return Budget(planned, limit, available, pages, tokens, max_seq_len, notes)


def _cure(terms: Sequence[Term]) -> str:
    """What to do about the largest term that a person can lower."""
    curable = [term for term in terms if term.cure]
    if not curable:
        return "raise --memory, or use a machine with more memory"
    largest = max(curable, key=lambda term: term.nbytes)
    return f"{largest.cure} ({largest.name} takes {_gib(largest.nbytes)})"


def _table(terms: Sequence[Term], limit: int, available: int) -> str:
    rows = [
        *((t.name, t.nbytes) for t in terms),
        ("sum", sum(t.nbytes for t in terms)),
        ("limit", limit),
        ("available", available),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {_gib(nbytes):>12}" for name, nbytes in rows)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
