"""The text format, as the format's own library reads it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from atlas_core.server.exposition import Counter, Histogram, Metric, Registry, render


class Fixed:
    """A collector of one metric."""

    def __init__(self, metric):
        self._metric = metric

    def collect(self):
        yield self._metric


def parsed(registry):
    """Family name → (kind, help, {(sample, labels): value})."""
    families = text_string_to_metric_families(render(registry).decode())
    return {
        family.name: (
            family.type, family.documentation,
            {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in family.samples},
        )
        for family in families
    }  # fmt: skip


def test_counters_with_and_without_labels():
    registry = Registry()
    plain = Counter("atlas_tokens", "Tokens.", registry=registry)
    labelled = Counter("atlas_requests", "Requests.", ("endpoint", "status"), registry=registry)
    assert parsed(registry)["atlas_tokens"] == ("counter", "Tokens.", {("atlas_tokens_total", ()): 0.0})
    plain.inc(3)
    labelled.inc(1, "/v1", "200")
    labelled.inc(2, "/v1", "200")
    labelled.inc(1, "/v1", "400")
    found = parsed(registry)
    assert found["atlas_tokens"][2] == {("atlas_tokens_total", ()): 3.0}
    assert found["atlas_requests"][2] == {
        ("atlas_requests_total", (("endpoint", "/v1"), ("status", status))): count
        for status, count in (("200", 3.0), ("400", 1.0))
    }


@settings(deadline=None)
@given(st.lists(st.floats(0, 20), max_size=30))
def test_a_histogram_counts_what_is_at_most_each_bound(values):
    registry, bounds = Registry(), (0.5, 1.0, 5.0)
    histogram = Histogram("atlas_seconds", "Seconds.", buckets=bounds, registry=registry)
    for value in values:
        histogram.observe(value)
    kind, _, samples = parsed(registry)["atlas_seconds"]
    assert kind == "histogram"
    for bound in (*bounds, math.inf):
        label = "+Inf" if bound == math.inf else repr(bound)
        assert samples["atlas_seconds_bucket", (("le", label),)] == sum(value <= bound for value in values)
    assert samples["atlas_seconds_count", ()] == len(values)
    assert samples["atlas_seconds_sum", ()] == pytest.approx(sum(values))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_any_label_and_help_come_back(value, about):
    registry = Registry()
    registry.register(Fixed(Metric.of("info", "atlas_x", f"A{about}B", 1.0, {"name": value})))
    text = render(registry).decode()
    assert len(text.split("\n")) == 4
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].labels == {"name": value}
    assert family.documentation == f"A{about}B"
