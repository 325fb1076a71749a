"""pytest adapter of conformance, opted into by ``pytest_plugins = ["atlas_core.testing.plugin"]`` in a test module.

The module defines ``conformance_subject() -> Subject`` (and, if it likes, ``conformance_options() -> Options``) and a test
that takes ``conformance_report``; it is run once for each implementation, with the id ``OP[implementation]``.
"""

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from atlas_core.conformance import run
from atlas_core.conformance.results import Report
from atlas_core.vocab.errors import UsageError

FIXTURE = "conformance_report"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each implementation of the module's subject."""
    if FIXTURE not in metafunc.fixturenames:
        return
    make = getattr(metafunc.module, "conformance_subject", None)
    if make is None:
        raise UsageError(
            f"{metafunc.module.__name__} takes {FIXTURE} and does not say of what",
            "it has no function conformance_subject",
            "define conformance_subject() -> atlas_core.conformance.run.Subject",
        )
    subject: run.Subject = make()
    options: run.Options = getattr(metafunc.module, "conformance_options", run.Options)()
    parts: Iterable[run.Subject] = [replace(subject, implementations=(one,)) for one in subject.implementations]
    ids = [f"{one.op}[{one.name}]" for one in subject.implementations]
    metafunc.parametrize(FIXTURE, [(part, options) for part in parts], ids=ids, indirect=True)


@pytest.fixture
def conformance_report(request: pytest.FixtureRequest) -> Report:
    """The report of one implementation; ``assert report.ok, report.table()``."""
    subject, options = request.param
    return run.test(subject, options)
