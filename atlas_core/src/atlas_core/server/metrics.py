"""Prometheus metrics, in a registry of the server's own."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from atlas_core.server.aliases import Aliases
from atlas_core.server.lifecycle import Lifecycle
from atlas_core.server.limits import Gate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters and histograms of requests, and the engine's gauges read at scrape time."""

    def __init__(self, lifecycle: Lifecycle, gate: Gate, aliases: Sequence[str] = ()) -> None:
        """``aliases``: whose names, beside our own, the metrics have; see server.aliases."""
        self._registry = CollectorRegistry()
        self._aliases = None
        if aliases:
            self._aliases = CollectorRegistry()
            for name in aliases:
                self._aliases.register(Aliases(self._registry, name, lifecycle))
        self._registry.register(_EngineGauges(lifecycle, gate))
        self._requests = Counter(
            "atlas_requests", "HTTP requests answered.", ("endpoint", "status"), registry=self._registry
        )
        self._finished = Counter(
            "atlas_sequences_finished", "Sequences by how they ended.", ("reason",), registry=self._registry
        )
        self._prompt = Counter("atlas_prompt_tokens", "Prompt tokens of answered sequences.", registry=self._registry)
        self._cached = Counter(
            "atlas_cached_tokens", "Prompt tokens that were not computed again.", registry=self._registry
        )
        self._tokens = _Tokens()
        self._registry.register(self._tokens)
        self._first = self._histogram("atlas_time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._queued = self._histogram("atlas_request_queue_seconds", "From arrival to the first step.", _FIRST)
        self._prefill = self._histogram(
            "atlas_request_prefill_seconds", "From the first step to the first token.", _FIRST
        )
        self._decode = self._histogram(
            "atlas_request_decode_seconds", "From the first token of a sequence to its last.", _WHOLE
        )
        self._each = self._histogram(
            "atlas_time_per_output_token_seconds", "Mean time of a sequence's tokens after its first.", _GAP
        )
        self._sequence = self._histogram("atlas_sequence_latency_seconds", "From arrival to a sequence's end.", _WHOLE)
        self._whole = Histogram(
            "atlas_request_latency_seconds", "From the head of a request to the end of its answer.", ("endpoint",),
            buckets=_WHOLE, registry=self._registry,
        )  # fmt: skip

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, buckets=buckets, registry=self._registry)

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """A request was answered. ``endpoint`` is a route, never a path: the number of label values has to be bounded."""
        self._requests.labels(endpoint, str(status)).inc()
        self._whole.labels(endpoint).observe(seconds)

    def first_token(self, count: int, seconds: float) -> None:
        """A sequence got its first ``count`` tokens, ``seconds`` after it arrived."""
        self._tokens.count += count
        self._first.observe(seconds)

    def tokens(self, count: int, gap: float) -> None:
        """``count`` tokens came, ``gap`` seconds each after an earlier one."""
        self._tokens.count += count
        self._tokens.observe(gap)

    def started(self, queued: float, prefill: float) -> None:
        """A sequence waited ``queued`` seconds for its first step, and ``prefill`` seconds after that for its first token."""
        self._queued.observe(queued)
        self._prefill.observe(prefill)

    def answered(self, whole: float, decode: float, tokens: int) -> None:
        """A sequence came to its end after ``whole`` seconds, ``decode`` seconds and ``tokens`` tokens after its first token."""
        self._sequence.observe(whole)
        self._decode.observe(decode)
        if tokens:
            self._each.observe(decode / tokens)

    def finished(self, reason: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A sequence ended: stop, length, error or abort."""
        self._finished.labels(reason).inc()
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)

    def render(self) -> bytes:
        """Everything, in the Prometheus text format."""
        return generate_latest(self._registry) + (b"" if self._aliases is None else generate_latest(self._aliases))


class _Tokens(Collector):
    """Tokens and the time between them, without the locks of prometheus-client: most of what is counted, and on the event loop alone."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._gaps = [0] * (len(_GAP) + 1)  # by the first bound that is not below, infinity last

    def observe(self, gap: float) -> None:
        """Seconds between two tokens."""
        self._sum += gap
        self._gaps[bisect_left(_GAP, gap)] += 1

    def collect(self) -> Iterator[Metric]:
        """The counts now."""
        yield CounterMetricFamily("atlas_generation_tokens", "Tokens generated.", value=self.count)
        bounds = zip((*map(str, _GAP), "+Inf"), accumulate(self._gaps), strict=True)
        yield HistogramMetricFamily(
            "atlas_inter_token_latency_seconds", "Between two tokens of a sequence.", buckets=list(bounds), sum_value=self._sum
        )  # fmt: skip


class _EngineGauges(Collector):
    def __init__(self, lifecycle: Lifecycle, gate: Gate) -> None:
        self._lifecycle = lifecycle
        self._gate = gate

    def describe(self) -> Iterator[Metric]:
        """Nothing: asking would need an engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The load now."""
        yield _gauge("atlas_ready", "1 when requests are served.", float(self._lifecycle.state == "ready"))
        yield _gauge("atlas_sequences_inside", "Sequences that the server has let in.", self._gate.inside)
        service = self._lifecycle.known
        if service is None:
            return
        now, info = service.engine.gauges, service.engine.info
        total = now.kv_tokens_total or info.kv_tokens
        yield _gauge("atlas_requests_running", "Sequences being computed.", now.running)
        yield _gauge("atlas_requests_waiting", "Sequences waiting for their first step.", now.waiting)
        yield _gauge("atlas_kv_tokens_used", "Cache positions in use.", now.kv_tokens_used)
        yield _gauge("atlas_kv_tokens_total", "Cache positions there are.", total)
        yield _gauge(
            "atlas_kv_tokens_kept",
            "Cache positions that are free and that a prompt may begin with.",
            now.kv_tokens_kept,
        )
        yield CounterMetricFamily(
            "atlas_kv_tokens_evicted", "Such positions that were given away.", value=now.kv_tokens_evicted
        )
        yield CounterMetricFamily(
            "atlas_kv_tokens_stateless",
            "Prompt tokens that were kept and computed again, since no recurrent state was.",
            value=now.kv_tokens_stateless,
        )
        usage = now.kv_tokens_used / total if total else 0.0
        yield _gauge("atlas_kv_usage_ratio", "Share of the cache in use, 0 to 1.", usage)
        pages = total // info.page_tokens if info.page_tokens else 0
        cache = InfoMetricFamily(
            "atlas_cache_config", "The cache: tokens of a page, pages, sequences at once, context."
        )
        cache.add_metric(
            (),
            {
                "page_tokens": str(info.page_tokens), "pages": str(pages), "max_batch_size": str(info.max_batch_size),
                "max_seq_len": str(info.max_seq_len),
            },
        )  # fmt: skip
        yield cache
        yield CounterMetricFamily("atlas_steps", "Steps computed.", value=now.steps)
        yield CounterMetricFamily(
            "atlas_preemptions", "Sequences put back to be computed again.", value=now.preemptions
        )
        if now.mixtures_run:
            about = "Distinct experts that mixtures read in steps of decoding."
            yield CounterMetricFamily("atlas_experts_read", about, value=now.experts_read)
            yield CounterMetricFamily("atlas_mixtures_run", "Mixtures run in such steps.", value=now.mixtures_run)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)
