"""What `atlas kernels test` puts on trial."""

from atlas_core.assembly import trials
from atlas_core.assembly.environment import discover_plugins
from atlas_core.conformance.backends import CHECKS
from atlas_core.conformance.results import Report, Result, joined


def test_a_backend_is_held_against_its_contract():
    heard = []
    ((name, report),) = trials.test_hardware(discover_plugins(), "cpu", "backend[", heard.append, 1)
    assert (name, report.ok) == ("cpu", True), report.table()
    assert [(result.op, result.label, result.status) for result in report.results] == [
        ("backend", label, "passed") for label in CHECKS
    ]
    assert heard == report.results


def test_processes_share_out_the_implementations():
    registry = discover_plugins()
    ((_, alone),) = trials.test_hardware(registry, "cpu", "_mul[", lambda result: None, 1)
    ((_, shared),) = trials.test_hardware(registry, "cpu", "_mul[", lambda result: None, 2)
    assert shared.ok, shared.table()
    assert shared.table() == alone.table()
    assert sorted(result.id for result in shared.results) == sorted(result.id for result in alone.results)
    assert len({result.implementation for result in shared.results}) > 1


def test_what_several_processes_tried_is_one_report():
    passed, failed = (Result("add", name, "x", status) for name, status in (("a", "passed"), ("b", "failed")))
    report = joined(
        [Report([passed], ["mul"]), Report([failed], ["mul"], "the process died"), Report([], [], "so did this")]
    )
    assert (report.results, report.missing, report.lost) == ([passed, failed], ["mul"], "the process died; so did this")
    assert not report.ok
