"""What `atlas kernels test` puts on trial."""

import pytest

from atlas_core.assembly import trials
from atlas_core.conformance.backends import CHECKS
from atlas_core.plugins import discover_plugins


@pytest.mark.parametrize(("text", "labels"), [("backend[", list(CHECKS)), ("](host link)", ["host link"])])
def test_a_backend_is_held_against_its_contract(text, labels):
    heard = []
    (name, report), = trials.test_hardware(discover_plugins(), "cpu", text, heard.append)  # fmt: skip
    assert (name, report.ok) == ("cpu", True), report.table()
    assert [(result.op, result.label, result.status) for result in report.results] == [
        ("backend", label, "passed") for label in labels
    ]
    assert heard == report.results
