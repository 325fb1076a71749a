"""Trials in a process of their own: whatever becomes of it, the report says what was being tried."""

import os
from functools import partial
from importlib import import_module

import pytest

from atlas_core.assembly.trial_process import report_of
from atlas_core.conformance.results import Report, Result
from atlas_core.vocab.errors import DeviceError, KernelError

SOURCE = """
import os
from atlas_core.conformance.results import Report, Result
from atlas_core.vocab.errors import DeviceError

FIRST, SECOND = Result("add", "toy.add", "one", "passed"), Result("add", "toy.add", "two", "begun")

def work(how, tell):
    if how == "early":
        os._exit(5)
    tell(Result("add", "toy.add", "one", "begun"))
    tell(FIRST)
    tell(SECOND)
    if how == "signal":
        os.abort()
    if how == "exit":
        os._exit(3)
    if how == "error":
        raise DeviceError("the device is gone", "the test said so", sticky=True)
    tell(Report([FIRST, Result("add", "toy.add", "two", "passed", str(os.getpid()))], ["mul"]))
"""
PASSED = Result("add", "toy.add", "one", "passed")


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "toy_trials_work.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda how: partial(import_module("toy_trials_work").work, how)


def test_the_report_comes_from_another_process(work):
    heard = []
    report = report_of(work("well"), heard.append)
    assert (heard, report.missing, report.lost) == ([PASSED], ["mul"], "")
    assert report.results[0] == PASSED
    assert int(report.results[1].detail) != os.getpid()


@pytest.mark.parametrize(
    ("how", "words"), [("signal", "died of SIGABRT"), ("exit", "ended without an answer (exit status 3)")]
)
def test_a_process_that_dies_names_the_trial(work, how, words):
    heard = []
    report = report_of(work(how), heard.append)
    failed = Result("add", "toy.add", "two", "failed", f"the process {words} while it ran")
    assert report == Report([PASSED, failed], [], f"the process {words} at add[toy.add](two); what follows was not run")
    assert heard == [PASSED, failed]
    assert not report.ok


def test_a_process_that_dies_before_the_first_trial(work):
    with pytest.raises(KernelError, match=r"the process of the trials ended without an answer \(exit status 5\)"):
        report_of(work("early"), lambda result: None)


def test_an_error_of_the_other_process_is_raised_here(work):
    with pytest.raises(DeviceError, match="the device is gone") as caught:
        report_of(work("error"), lambda result: None)
    assert (caught.value.why, caught.value.sticky) == ("the test said so", True)
