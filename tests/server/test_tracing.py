import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from atlas_core.server.tracing import OpenTelemetry, open_telemetry
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import UsageError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collected:
    def __init__(self, serve, kit, **more):
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.kit = kit
        self.server = serve(tracing=OpenTelemetry(SimpleSpanProcessor(self.exporter), self.reader), **more)

    def spans(self, count):
        self.kit.until(lambda: len(self.exporter.get_finished_spans()) >= count)
        return self.exporter.get_finished_spans()

    def points(self):
        metrics = self.reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: metric.data.data_points[0] for metric in metrics}


@pytest.fixture
def collected(serve, kit):
    return lambda **more: Collected(serve, kit, **more)


def test_a_request_is_a_child_of_the_clients_span(collected, kit):
    found = collected(engine=kit.engine(delay=0.001), api_keys=("k",))
    before = time.time_ns()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "org/tiny", "stream": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-api-key": "k", "x-request-id": "r1"}
    assert found.server.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    span = found.spans(1)[0]
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert (span.name, span.kind) == ("chat org/tiny", SpanKind.SERVER)
    assert before - 10**9 < span.start_time < span.events[0].timestamp < span.end_time < time.time_ns() + 1
    attributes = dict(span.attributes)
    assert 0 < attributes.pop("gen_ai.server.time_to_first_token") < 5
    assert attributes.pop("atlas.api_key.name").startswith("key-")
    assert attributes == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions",
        "http.response.status_code": 200, "atlas.request.id": "r1", "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "atlas", "gen_ai.request.model": "org/tiny", "gen_ai.response.model": "org/tiny",
        "gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert span.resource.attributes["service.name"] == "atlas"
    points = found.points()
    assert points.keys() == {
        "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token",
    }  # fmt: skip
    duration, each = points["gen_ai.server.request.duration"], points["gen_ai.server.time_per_output_token"]
    assert (duration.count, duration.attributes["gen_ai.request.model"]) == (1, "org/tiny")
    first = points["gen_ai.server.time_to_first_token"].sum
    assert each.sum == pytest.approx((duration.sum - first) / 2)


def test_without_a_parent_every_request_has_a_trace_of_its_own(collected):
    found = collected()
    found.server.complete(max_tokens=1)
    found.server.http.get("/version", headers={"traceparent": "nonsense"})
    found.server.http.get("/health")
    found.server.chat(temperature=-1)
    spans = sorted(found.spans(3), key=lambda span: span.start_time)
    assert [span.name for span in spans] == ["text_completion tiny", "GET /version", "POST /v1/chat/completions"]
    assert len({span.context.trace_id for span in spans}) == 3
    assert [span.parent for span in spans] == [None] * 3
    assert (spans[2].attributes["error.type"], spans[2].status.status_code) == ("400", StatusCode.UNSET)


def test_what_the_client_called_the_model(collected):
    found = collected()
    found.server.chat(max_tokens=1, model="gpt-x")
    span = found.spans(1)[0]
    assert span.name == "chat tiny"
    names = ("gen_ai.request.model", "gen_ai.response.model")
    assert [span.attributes[name] for name in names] == ["gpt-x", "tiny"]
    assert found.points()["gen_ai.server.request.duration"].attributes["gen_ai.request.model"] == "tiny"


def test_a_failure_is_an_error(collected, kit):
    def broken(request):
        raise ZeroDivisionError

    found = collected(engine=kit.engine(answer=broken))
    found.server.chat()
    span = found.spans(1)[0]
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "500")


def test_a_collector_that_is_not_there_holds_nothing_up(serve):
    server = serve(tracing=open_telemetry("http://127.0.0.1:9"))
    assert server.chat().status_code == 200
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 6
    server.stop = lambda: None


def test_without_the_extra_the_start_says_what_to_install():
    program = """
import sys
sys.modules["opentelemetry"] = None
from atlas_core.server.app import Application
from atlas_core.server.tracing import open_telemetry
from atlas_core.vocab.errors import UsageError
try:
    open_telemetry("http://127.0.0.1:9")
except UsageError as error:
    print(error.cure)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "pip install 'atlas-core[otel]'\n"


def test_nothing_is_imported_unless_asked_for():
    program = "import sys, atlas_core.assembly.serve; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_endpoints():
    assert read_settings({"otlp_endpoint": "http://host:4318/x"}, {}).otlp_endpoint == "http://host:4318/x"
    for bad in ("host:4318", "ftp://host", "http://", "http://h?x=1", "http://u:secret@h"):
        with pytest.raises(UsageError, match="otlp-endpoint must be a URL"):
            read_settings({"otlp_endpoint": bad}, {})
