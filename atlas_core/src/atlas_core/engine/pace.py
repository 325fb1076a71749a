"""When to launch the next step: shortly before the one that runs has ended, so that whoever comes meanwhile is in it."""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

SAMPLES, KNOWN = 8, 3
"""Steps of one kind that are remembered, and those that have to be before anything is predicted."""
SHORT = 2e-3
"""Seconds: a step that may take less is not worth the risk."""
SAFETY, SHARE = 0.3e-3, 0.05
"""Seconds, and parts of a step, between the end that is predicted and the time at which the next step should have been launched."""
AT_ONCE = 50e-6
"""Seconds within which waiting for a step returns that had ended before."""
CALMING = 0.98
"""What is left after each punctual step of the caution that a late one taught."""


class Load(NamedTuple):
    """What a step has to do. Steps of one ``kind`` run the same kernels; of None nothing is known.

    ``tokens`` are its own; ``attended`` counts, for each of them, the positions up to the last of its row.
    """

    kind: Hashable
    tokens: int
    attended: int


class Sample(NamedTuple):
    """A step that took ``seconds``."""

    load: Load
    seconds: float


class Pace:
    """Watches steps of an asynchronous device, at most two in flight, and predicts when one ends. All times are the caller's, seconds.

    A step takes at least as long as the shortest of the last of its kind, or the same share of it as it has of that one's tokens or
    attended positions, whichever is less: time grows with both, and is not all theirs. Taken off are by how much that is shorter than
    they usually are, what the host needed of late between the time at which it should have begun and the launch, and more whenever the
    device was found to have waited. Where an end is not known, neither is the next one.
    """

    def __init__(self) -> None:
        self._samples: dict[Hashable, deque[Sample]] = {}
        # With when it should have been launched, if that was put off.
        self._flight: deque[tuple[Load, float | None]] = deque()
        self._began: float | None = None
        self._target: float | None = None
        self._delays: deque[float] = deque(maxlen=SAMPLES)
        self._caution = 0.0

    def launch_at(self, now: float) -> float | None:
        """When to begin with the next step; None, at once. The step in flight is the only one."""
        self._target = None
        if len(self._flight) != 1 or self._began is None:
            return None
        load, _ = self._flight[0]
        samples = self._samples.get(load.kind)
        if samples is None or len(samples) < KNOWN or samples[-1].seconds < SHORT:
            return None
        times = [sample.seconds * _share(load, sample.load) for sample in samples]
        shortest = min(times)
        if shortest < SHORT:
            return None
        lead = SAFETY + SHARE * shortest + _median(times) - shortest + max(self._delays, default=0.0) + self._caution
        target = self._began + shortest - lead
        if target <= now:
            return None
        self._target = target
        return target

    def launched(self, load: Load, at: float) -> None:
        """A step has been launched."""
        if self._target is not None:
            self._delays.append(max(0.0, at - self._target))
        if not self._flight:
            self._began = at
        self._flight.append((load, self._target))
        self._target = None

    def collected(self, asked: float, ended: float) -> None:
        """The oldest step has ended, for which the caller has waited since ``asked``."""
        load, _ = self._flight.popleft()
        seen = ended - asked > AT_ONCE
        if seen and self._began is not None and load.kind is not None:
            samples = self._samples.setdefault(load.kind, deque(maxlen=SAMPLES))
            samples.append(Sample(load, ended - self._began))
        if self._flight and self._flight[0][1] is not None:
            self._caution = self._caution * CALMING if seen else max(SAFETY, 2 * self._caution)
        self._began = ended if self._flight and seen else None
        self._target = None


def _share(load: Load, of: Load) -> float:
    return min(1.0, load.tokens / of.tokens, load.attended / of.attended)


def _median(values: Sequence[float]) -> float:
    """As that of ``statistics``, which loads fractions and decimals to tell it."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
