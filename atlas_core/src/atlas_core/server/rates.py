"""Rate limits: token buckets, one pair for each client. Pure: time is handed in."""

import math
from collections import OrderedDict

from msgspec import Struct, field

MOST_CLIENTS = 10_000
"""Buckets that are kept; the one that was used longest ago makes room."""

_ROUNDING = 1e-6


class Rates(Struct, frozen=True):
    """``requests`` and ``tokens`` a minute; None is no limit. ``burst`` are the seconds for which a quiet client saves up."""

    requests: int | None = None
    tokens: int | None = None
    burst: float = 60.0


class Bucket:
    """Fills by ``rate`` a minute up to what ``burst`` seconds bring, at least 1; may be drawn below zero, and must recover then."""

    def __init__(self, rate: int, burst: float, now: float) -> None:
        self.rate = rate
        self._per_second = rate / 60
        self._capacity = max(1.0, self._per_second * burst)
        self._level = self._capacity
        self._at = now

    def level(self, now: float) -> float:
        """What is in it."""
        self._level = min(self._capacity, self._level + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)
        return self._level

    def draw(self, count: float, now: float) -> None:
        """Take ``count``, whether it is there or not."""
        self._level = self.level(now) - count

    def wait(self, now: float) -> float:
        """Seconds until at least 1 is in it."""
        missing = 1 - self.level(now)
        # Who comes back exactly when told must not be sent away for a rounding error.
        return missing / self._per_second if missing > _ROUNDING else 0.0

    def reset(self, now: float) -> float:
        """Seconds until it is full."""
        return (self._capacity - self.level(now)) / self._per_second


class Verdict(Struct):
    """``wait``: seconds until the client may come again; 0 lets it in. ``limit`` names what was used up. ``headers`` tell the rest."""

    wait: float = 0.0
    limit: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class RateLimiter:
    """Counts requests when they come, and tokens when an answer has ended: what it takes is known only then.

    A client is let in as long as its buckets hold at least 1. So an answer may draw more tokens than there are, and whoever sent the
    request waits until they are made up for; the rate over minutes is the one that was set.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._clients: OrderedDict[str, dict[str, Bucket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def admit(self, client: str, now: float) -> Verdict:
        """Whether a request may come in at ``now``, seconds; one that may is counted."""
        buckets = self._buckets(client, now)
        waits = {name: bucket.wait(now) for name, bucket in buckets.items()}
        limit = max(waits, key=lambda name: waits[name], default="")
        verdict = Verdict(waits.get(limit, 0.0), limit)
        if not verdict.wait and "requests" in buckets:
            buckets["requests"].draw(1, now)
        for name, bucket in buckets.items():
            verdict.headers |= {
                f"x-ratelimit-limit-{name}": str(bucket.rate),
                f"x-ratelimit-remaining-{name}": str(max(0, math.floor(bucket.level(now)))),
                f"x-ratelimit-reset-{name}": f"{bucket.reset(now):.3f}s",
            }
        return verdict

    def charge(self, client: str, tokens: int, now: float) -> None:
        """Take the ``tokens`` of an answer."""
        buckets = self._buckets(client, now)
        if "tokens" in buckets:
            buckets["tokens"].draw(tokens, now)

    def _buckets(self, client: str, now: float) -> dict[str, Bucket]:
        found = self._clients.get(client)
        if found is None:
            rates = {"requests": self._rates.requests, "tokens": self._rates.tokens}
            found = {name: Bucket(rate, self._rates.burst, now) for name, rate in rates.items() if rate is not None}
            if len(self._clients) >= MOST_CLIENTS:
                self._clients.popitem(last=False)
            self._clients[client] = found
        self._clients.move_to_end(client)
        return found
