import io
import sys
import types

import pytest

from atlas_core.cli.console import Console, aligned, size
from atlas_core.cli.main import main
from atlas_core.vocab.errors import BudgetError
from atlas_core.vocab.messages import LedgerEntry, Progress, Ready

INFO = Ready(
    2048, 8, 100, "fp", (LedgerEntry("weights", 1.5, 3 * 2**20), LedgerEntry("graphs", 0.25)),
    (("weights", 3 * 2**20), ("cache", 512)),
)  # fmt: skip


@pytest.fixture
def assembly(monkeypatch):
    calls, engines = [], []
    fake = types.ModuleType("atlas_core.assembly.serve")

    def serve(settings, registry, reporter, engine, listener):
        assert listener.getsockname()[1]
        assert engine.returncode is None
        engines.append(engine)
        calls.append((settings, registry, reporter))
        if settings.max_queue == 1:
            raise BudgetError("too big", "because", "do")
        return 3 if settings.max_queue == 2 else 0

    fake.serve = serve
    monkeypatch.setitem(sys.modules, "atlas_core.assembly.serve", fake)
    yield calls
    assert all(engine.returncode is not None for engine in engines)


def test_settings_reach_the_assembly(assembly, monkeypatch):
    monkeypatch.setenv("ATLAS_MAX_QUEUE", "3")
    assert main(["serve", "tiny", "--port", "0", "--api-key", "a", "--api-key", "b"]) == 0
    settings, registry, reporter = assembly[0]
    assert (settings.model, settings.port, settings.api_key, settings.max_queue) == ("tiny", 0, ("a", "b"), 3)
    assert isinstance(reporter, Console)
    assert "plain" in registry.quant_formats


def test_exit_codes(assembly, capsys):
    assert main(["serve", "tiny", "--port", "0", "--max-queue", "2"]) == 3
    assert main(["serve", "tiny", "--port", "0", "--max-queue", "1"]) == 7
    assert "error: too big\n  why:  because\n  cure: do" in capsys.readouterr().err
    assert main(["serve"]) == 2
    assert "no model is given" in capsys.readouterr().err
    assert main(["serve", "tiny", "--prot", "1"]) == 2
    assert len(assembly) == 2


class Terminal(io.StringIO):
    def isatty(self):
        return True


def story(console):
    for done in (0, 4, 5, 50, 99, 100):
        console.progress(Progress("weights", done, 100, "layer"))
    console.progress(Progress("graphs", 0, 0))
    console.ready("http://h:1", INFO)


def test_a_log_gets_a_line_a_phase_and_tenth():
    stream = io.StringIO()
    story(Console(stream))
    lines = stream.getvalue().splitlines()
    assert lines[:5] == [
        "weights  0 %  layer",
        "weights  50 %  layer",
        "weights  99 %  layer",
        "weights  100 %  layer",
        "graphs",
    ]
    assert lines[5:] == [
        "start", "  weights  1.50 s  3.0 MiB  2.0 MiB/s", "  graphs   0.25 s", "  total    1.75 s",
        "memory", "  weights  3.0 MiB", "  cache      512 B", "  total    3.0 MiB",
        "ready: http://h:1/v1  (context 2048 tokens, 8 sequences at once)",
    ]  # fmt: skip


def test_a_terminal_gets_one_line_rewritten():
    stream = Terminal()
    story(Console(stream))
    before, _, after = stream.getvalue().partition("start")
    assert "\n" not in before
    assert before.count("\r\x1b[K") == 8
    assert "\r" not in after


def test_sizes():
    assert [size(n) for n in (0, 1023, 1024, 1536, 2**40, 2**52)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 TiB",
        "4096.0 TiB",
    ]
    assert list(aligned([("a", "1"), ("bcd", "200")])) == ["a      1", "bcd  200"]
