"""What all tests of the workspace share: the Hypothesis profile, the shared inputs, and the rule about skipping."""

import importlib
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

ALLOWED_SKIPS = (
    "needs a GPU",
    "needs an instruction set",
    "needs npm",
    "needs nvcc",
    "needs openssl",
    "needs qemu",
    "needs the shared test inputs",
)
"""A test may be skipped for what a machine lacks, and for nothing else; reasons begin with one of these."""

# Tests run side by side: threads of numpy's products would wait for one another's cores, several times as long as they work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A distribution at the root must be known before its tests are collected: pytest would take its folder for the package.
for _project in Path(__file__).resolve().parent.glob("*/pyproject.toml"):
    importlib.import_module(_project.parent.name)

# Two cores are shared with everything else: time limits of single examples would fail by chance.
# No start may depend on one before it, and nothing is written into anybody's cache.
os.environ["ATLAS_START_CACHE"] = "none"

settings.register_profile("atlas", deadline=None)
settings.load_profile("atlas")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared test inputs: ATLAS_SHARED, or ``shared`` beside the checkout."""
    folder = Path(os.environ.get("ATLAS_SHARED") or Path(__file__).resolve().parent.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"needs the shared test inputs: there is no folder {folder}")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take minutes: at the end, one of them would leave the other processor without work."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped for a reason not on the list."""
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    _judge(report)
    return report


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = (
        report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
    )
    if not reason.startswith(ALLOWED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that is not allowed (see ALLOWED_SKIPS in conftest.py): {reason}"
