"""What the kernel's files say about processors and memory."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from atlas_core.vocab.errors import DeviceError
from atlas_core.vocab.target import Target
from atlas_plugin_cpu import machine
from atlas_plugin_cpu.archs import ARCHS
from atlas_plugin_cpu.backend import open_backend


@pytest.mark.parametrize(
    ("text", "want"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000\n", 0.5), ("", None)]
)
def test_quota(text, want):
    assert machine.quota(text) == want


def test_a_quota_caps_the_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for text, want in (("max 100000", 8), ("250000 100000", 2), ("10000 100000", 1), ("", 8)):
        monkeypatch.setattr(machine, "read", lambda _, text=text: text)
        assert machine.usable_processors() == want


def test_the_probe_accepts_this_machine_last():
    verdict = machine.probe()
    assert verdict.ok
    assert verdict.rank < 0
    assert "processors" in verdict.reasons[0]


def test_an_older_processor_refuses_kernels_that_would_crash_it(monkeypatch):
    flags = "fpu sse avx avx2 bmi1 bmi2 f16c fma movbe xsave avx512f"
    monkeypatch.setattr(machine, "read", lambda _: f"processor\t: 0\nmodel name\t: Old One\nflags\t\t: {flags}\n")
    assert machine.missing_features("x86-64-v3") == ()
    lacks = ("avx512_vnni", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
    assert machine.missing_features("x86-64-v4-vnni") == lacks
    assert machine.runs("x86-64-v4-vnni").reasons == (f"Old One lacks {', '.join(lacks)}",)
    library = SimpleNamespace(target=Target("cpu", "x86-64-v4-vnni"))
    with pytest.raises(DeviceError, match="do not run on Old One"):
        open_backend(library)


def test_the_richest_architecture_that_runs_ranks_first(monkeypatch):
    flags = " ".join(ARCHS["x86-64-v4-amx"].features)
    monkeypatch.setattr(machine, "read", lambda _: f"flags\t\t: {flags}\n")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    verdicts = {arch: machine.runs(arch) for arch in ("native-12345678", *ARCHS)}
    accepted = sorted((name for name, verdict in verdicts.items() if verdict.ok), key=lambda name: -verdicts[name].rank)
    assert accepted == ["native-12345678", "x86-64-v4-amx", "x86-64-v4-vnni", "x86-64-v3"]
    assert not machine.runs("riscv64").ok


def test_the_build_hook_knows_the_machine_of_every_architecture():
    path = Path(__file__).parents[1] / "hatch_build.py"
    tree = ast.parse(path.read_text("utf-8"))
    (table,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_MACHINES"
    )
    for name, arch in ARCHS.items():
        assert [machine for prefix, machine in table.items() if name.startswith(prefix)] == [arch.machine]
