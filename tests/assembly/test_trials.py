"""What `atlas kernels test` puts on trial."""

from atlas_core.assembly import trials
from atlas_core.assembly.environment import discover_plugins
from atlas_core.conformance.backends import CHECKS


def test_a_backend_is_held_against_its_contract():
    heard = []
    ((name, report),) = trials.test_hardware(discover_plugins(), "cpu", "backend[", heard.append)
    assert (name, report.ok) == ("cpu", True), report.table()
    assert [(result.op, result.label, result.status) for result in report.results] == [
        ("backend", label, "passed") for label in CHECKS
    ]
    assert heard == report.results
