"""Traces and metrics for OpenTelemetry, in the words of its conventions for generative AI. Imports its SDK only when asked to."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atlas_core import __version__
from atlas_core.server.boundary import PROBES, Record
from atlas_core.vocab.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace import SpanProcessor

_LONGEST_NAME = 128
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}


class OpenTelemetry:
    """One span a request, a child of the client's ``traceparent``, and the durations of requests that generate."""

    def __init__(self, spans: "SpanProcessor", metrics: "MetricReader") -> None:
        """``spans`` and ``metrics`` are where both go."""
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": "atlas", "service.version": __version__})
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._spans.add_span_processor(spans)
        self._tracer = self._spans.get_tracer("atlas", __version__)
        self._meters = MeterProvider([metrics], resource, shutdown_on_exit=False)
        meter = self._meters.get_meter("atlas", __version__)
        self._duration = meter.create_histogram("gen_ai.server.request.duration", "s")
        self._first = meter.create_histogram("gen_ai.server.time_to_first_token", "s")
        self._each = meter.create_histogram("gen_ai.server.time_per_output_token", "s")

    def finished(self, record: Record, headers: Mapping[str, str], ended: int) -> None:
        """Make a span of ``record``; probes have none."""
        if record.endpoint in PROBES:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        started = ended - int(record.seconds * 1e9)
        attributes = _attributes(record)
        kind = attributes.get("gen_ai.operation.name")
        span = self._tracer.start_span(
            f"{kind} {record.model}" if kind else f"{record.method} {record.endpoint}",
            TraceContextTextMapPropagator().extract(headers), SpanKind.SERVER, attributes, start_time=started,
        )  # fmt: skip
        if record.first_token is not None:
            span.add_event("first_token", timestamp=started + int(record.first_token * 1e9))
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error))
        if kind:
            self._measure(record, attributes)
        # Last: whoever sees the span has all that there is of its request.
        span.end(ended)

    def close(self) -> None:
        """Send what is left."""
        self._spans.shutdown()
        self._meters.shutdown()

    def _measure(self, record: Record, attributes: Mapping[str, Any]) -> None:
        names = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.response.model", "error.type")
        labels = {name: attributes[name] for name in names if name in attributes}
        # Not as clients call it: the number of series has to be bounded.
        labels["gen_ai.request.model"] = record.model
        self._duration.record(record.seconds, labels)
        if record.first_token is None:
            return
        self._first.record(record.first_token, labels)
        sequences = len(record.finish)
        if record.completion_tokens > sequences:
            rest = record.seconds - record.first_token
            self._each.record(rest * sequences / (record.completion_tokens - sequences), labels)


def open_telemetry(endpoint: str) -> OpenTelemetry:
    """Sends to the OTLP collector at ``endpoint``, over HTTP. Raises UsageError when the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError(
            "--otlp-endpoint is given, and OpenTelemetry is not installed", str(error), "pip install 'atlas-core[otel]'"
        ) from error
    base = endpoint.rstrip("/")
    return OpenTelemetry(
        BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")),
        PeriodicExportingMetricReader(OTLPMetricExporter(f"{base}/v1/metrics")),
    )


def _attributes(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.route": record.endpoint,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "atlas.request.id": record.id,
    }
    if record.status >= 400:
        found["error.type"] = str(record.status)
    if record.key:
        found["atlas.api_key.name"] = record.key
    if record.model:
        found |= {
            "gen_ai.operation.name": _OPERATIONS.get(record.endpoint, "chat"),
            "gen_ai.provider.name": "atlas",
            "gen_ai.request.model": record.requested[:_LONGEST_NAME] or record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.response.finish_reasons": record.finish,
        }
    if record.first_token is not None:
        found["gen_ai.server.time_to_first_token"] = record.first_token
    return found
