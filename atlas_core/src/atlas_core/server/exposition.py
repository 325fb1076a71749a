"""Counters and histograms, and the Prometheus text format 0.0.4 (prometheus.io, "Exposition formats")."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, Protocol

Kind = Literal["counter", "gauge", "histogram", "info"]
_SUFFIX: Mapping[Kind, str] = {"counter": "_total", "info": "_info", "gauge": "", "histogram": ""}
_WORD: Mapping[Kind, str] = {"info": "gauge"}
"""What a kind is called in the text format, where that does not know it."""
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Sample(NamedTuple):
    """One line: a name that begins with its metric's, labels, a value."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class Metric:
    """A name with its samples. A counter's samples end in ``_total``, those of an info in ``_info``."""

    name: str
    documentation: str
    kind: Kind
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def of(cls, kind: Kind, name: str, about: str, value: float, labels: Mapping[str, str] | None = None) -> "Metric":
        """A metric of one sample."""
        return cls(name, about, kind, [Sample(name + _SUFFIX[kind], labels or {}, value)])


class Collector(Protocol):
    """Whatever has metrics when it is asked."""

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        ...


class Registry:
    """Collectors in the order in which they came."""

    def __init__(self) -> None:
        self._collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """One more; nobody looks whether its names are taken."""
        self._collectors.append(collector)

    def collect(self) -> Iterator[Metric]:
        """Every metric of every collector."""
        for collector in self._collectors:
            yield from collector.collect()


class Counter:
    """Counts up, for each combination of label values that occurred; without labels from 0 on."""

    def __init__(self, name: str, about: str, labels: Sequence[str] = (), *, registry: Registry) -> None:
        self._name, self._about, self._labels = name, about, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def inc(self, by: float = 1.0, *values: str) -> None:
        """Add ``by`` to the count of these label values, in the order of the labels."""
        self._values[values] = self._values.get(values, 0.0) + by

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        samples = [
            Sample(f"{self._name}_total", dict(zip(self._labels, values, strict=True)), count)
            for values, count in self._values.items()
        ]
        yield Metric(self._name, self._about, "counter", samples)


class Histogram:
    """How many observations were at most each of ``buckets`` (ascending; infinity is added), and their sum."""

    def __init__(
        self, name: str, about: str, labels: Sequence[str] = (), *, buckets: Sequence[float], registry: Registry
    ) -> None:
        self._name, self._about, self._labels = name, about, tuple(labels)
        self._bounds = (*buckets, inf)
        # By label values: the number of observations in each bucket alone, then their sum.
        self._counts: dict[tuple[str, ...], list[float]] = {} if labels else {(): self._empty()}
        registry.register(self)

    def observe(self, value: float, *values: str) -> None:
        """One observation, for these label values."""
        counts = self._counts.setdefault(values, self._empty()) if self._labels else self._counts[()]
        counts[bisect_left(self._bounds, value)] += 1
        counts[-1] += value

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        samples = []
        for values, (*counts, total) in self._counts.items():
            labels, below = dict(zip(self._labels, values, strict=True)), 0.0
            for bound, count in zip(self._bounds, counts, strict=True):
                below += count
                samples.append(Sample(f"{self._name}_bucket", {**labels, "le": _number(bound)}, below))
            samples += [Sample(f"{self._name}_count", labels, below), Sample(f"{self._name}_sum", labels, total)]
        yield Metric(self._name, self._about, "histogram", samples)

    def _empty(self) -> list[float]:
        return [0.0] * (len(self._bounds) + 1)


def render(registry: Registry) -> bytes:
    """Every metric of a registry as text."""
    lines = []
    for metric in registry.collect():
        name = metric.name + _SUFFIX[metric.kind]
        about = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {_WORD.get(metric.kind, metric.kind)}"]
        lines += [f"{sample.name}{_labelled(sample.labels)} {_number(sample.value)}" for sample in metric.samples]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}"


def _number(value: float) -> str:
    return "+Inf" if value == inf else repr(float(value))
