"""A machine's driver starts while files are read, and is let go once the backend holds it, or when nothing comes of the start."""

import sys
import types
from pathlib import Path

import pytest
from msgspec.structs import replace

from atlas_core.assembly import engine
from atlas_core.assembly.engine import Ledger, build
from atlas_core.plugins import discover
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import AtlasError, DeviceError

TINY = Path(__file__).parents[1] / "data/tiny/llama"


@pytest.fixture
def driver(monkeypatch):
    """A driver that writes down what happens to it; the CPU's plugin declares it."""
    told, module = [], types.ModuleType("toy_driver")

    def wake():
        told.append("awake")
        return lambda: told.append("asleep")

    def broken():
        raise DeviceError("there is no driver", "the test said so")

    module.wake, module.broken = wake, broken
    monkeypatch.setitem(sys.modules, "toy_driver", module)
    choose, open_backend = engine.choose_machine, engine.open_backend

    def declared(name):
        def chosen(registry, wanted):
            machine = choose(registry, wanted)
            return replace(machine, declaration=replace(machine.declaration, wake=f"toy_driver:{name}"))

        monkeypatch.setattr(engine, "choose_machine", chosen)
        return told

    def opened(*arguments):
        told.append("opened")
        return open_backend(*arguments)

    monkeypatch.setattr(engine, "open_backend", opened)
    return declared


def start(model=TINY):
    settings = read_settings({"model": str(model), "hardware": "cpu", "max_seq_len": "64", "max_batch_size": "1"}, {})
    return build(settings, discover(), Ledger(lambda progress: None))


def test_it_is_held_until_the_backend_is_open(driver):
    told = driver("wake")
    start().close()
    assert told == ["awake", "opened", "asleep"]


def test_it_is_let_go_when_there_is_no_model(driver, tmp_path):
    told = driver("wake")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AtlasError):
        start(tmp_path)
    assert told == ["awake", "asleep"]


def test_one_that_cannot_start_is_left_to_the_backend(driver):
    told = driver("broken")
    start().close()
    assert told == ["opened"]
