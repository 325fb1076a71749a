import os
import time

import pytest

from atlas_core.plugins.probe import Prober
from atlas_core.vocab.verdict import Verdict

PROBES = """
import os, signal, subprocess, sys, time
from pathlib import Path
from atlas_core.vocab.verdict import Verdict

def present():
    print("driver 1.2 loaded", end="")
    with Path(__file__).with_name("count").open("a") as file:
        file.write("x")
    return Verdict.yes(7, "toy device, 3 GB", "snow: \\u2603")

def absent():
    return Verdict.no("no device node")

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def hang():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])

def fail():
    raise OSError("libtoy.so.1: cannot open shared object file")

def leave():
    os._exit(0)

def wrong():
    return True
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toy_probes.py").write_text(PROBES)
    return tmp_path


@pytest.fixture
def prober(folder):
    return Prober(30.0, {**os.environ, "PYTHONPATH": str(folder)})


def test_a_verdict_comes_back_whole_and_is_asked_for_once(prober, folder):
    expected = Verdict.yes(7, "toy device, 3 GB", "snow: ☃")
    assert prober.probe("toy_probes:present", "toy-dist") == expected
    assert prober.probe("toy_probes:present", "toy-dist") == expected
    assert (folder / "count").read_text() == "x"


def test_a_refusal_keeps_its_reason(prober):
    assert prober.probe("toy_probes:absent", "toy-dist") == Verdict.no("no device node")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crash", "the probe toy_probes:crash died of SIGSEGV: it said nothing"),
        ("fail", "failed: OSError: libtoy.so.1: cannot open shared object file"),
        ("leave", "ended without an answer (exit status 0): it said nothing"),
        ("wrong", "answered True, not a Verdict"),
        ("nothing", "has no attribute 'nothing'"),
    ],
)
def test_whatever_goes_wrong_is_a_refusal(prober, name, reason):
    verdict = prober.probe(f"toy_probes:{name}", "toy-dist")
    assert not verdict.ok
    assert reason in verdict.reasons[0]


def test_a_hang_is_ended_with_everything_it_started(folder):
    prober = Prober(1.0, {**os.environ, "PYTHONPATH": str(folder)})
    start = time.monotonic()
    verdict = prober.probe("toy_probes:hang", "toy-dist")
    assert time.monotonic() - start < 20
    assert verdict == Verdict.no("the probe toy_probes:hang did not answer within 1 s")
