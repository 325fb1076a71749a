"""A start that takes what an earlier one kept is the start that would have been planned, and is not taken when anything has changed."""

import logging
import os
import shutil
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atlas_core.assembly import engine
from atlas_core.assembly.engine import Ledger, build, engine_of
from atlas_core.assembly.kept import file, installed, marks
from atlas_core.assembly.kept import start as starts
from atlas_core.assembly.kept.plan import planned, tabled
from atlas_core.assembly.kept.tables import Tables
from atlas_core.assembly.machine import choose_machine
from atlas_core.assembly.model import open_model
from atlas_core.assembly.plan import make_plan
from atlas_core.plugins import discover
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.settings import read_settings
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams
from atlas_core.vocab.verdict import Verdict

TINY = Path(__file__).parents[1] / "data/tiny"
SIZES = {"hardware": "cpu", "max_batch_size": "1", "max_prefill_tokens": "16", "max_seq_len": "32"}
PROMPT = (5, 9, 2, 77)
LONG_AGO = 10**18


@pytest.fixture
def model(tmp_path):
    shutil.copytree(TINY / "llama", tmp_path / "llama")
    for path in (tmp_path / "llama").iterdir():
        os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return tmp_path / "llama"


@pytest.fixture(scope="module")
def registry():
    return discover()


class Start:
    """A start, to its end: what its phases were, its plan, its logits, how it names itself."""

    def __init__(self, folder, registry, model, **given):
        ledger = Ledger(lambda progress: None)
        asked = read_settings({"model": str(model), **SIZES, **given}, {})
        built = build(asked, registry, ledger, folder=folder)
        for thread in threading.enumerate():
            if thread.name == "atlas-keep":
                thread.join()
        self.taken = "kept start" in [entry.phase for entry in ledger.entries]
        self.plan, self.library = built.plan, built.library
        self.fingerprint = engine_of(built, registry, ledger).info.fingerprint
        try:
            scheduler = Scheduler(built.limits)
            scheduler.submit(Generate("a", PROMPT, SamplingParams(temperature=0, max_tokens=1)), seed=0, stop_ids=())
            ticket = built.runner.launch(scheduler.schedule())
            self.logits = np.array(built.runner.read_logits(ticket))
            built.runner.collect(ticket)
        finally:
            built.model.checkpoint.close()
            built.close()


def kept_registry(folder):
    found = installed.find(folder)
    assert found is not None
    return found


def test_it_is_the_start_that_was_planned(model, registry, tmp_path, monkeypatch):
    folder = tmp_path / "starts"
    plain = Start(None, registry, model)
    first = Start(folder, registry, model)
    assert not first.taken
    assert {path.suffix for path in folder.iterdir()} == {".start", ".installed"}
    known = kept_registry(folder)
    for name in ("choose_machine", "make_plan"):
        monkeypatch.setattr(engine, name, None)
    monkeypatch.setattr("atlas_core.kernels.manifest._parse", None)
    again = Start(folder, known, model)
    assert again.taken
    assert tabled(again.plan) == tabled(plain.plan)
    assert again.plan.settings == plain.plan.settings
    assert again.fingerprint == plain.fingerprint
    assert np.array_equal(again.logits, plain.logits)
    assert {k.module: k for k in again.library.found()} == {k.module: k for k in plain.library.found()}


def test_what_was_kept_of_plugins_is_what_is_found(registry, tmp_path):
    installed.keep(tmp_path, registry)
    known = kept_registry(tmp_path)
    assert [replace(r, milliseconds=0) for r in known.records] == [replace(r, milliseconds=0) for r in registry.records]
    assert known.identity() == registry.identity()
    assert known.kernel_roots() == registry.kernel_roots()


@pytest.mark.parametrize("hardware", ["cpu", "hopper", "gb10"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe", "gemma3", "minimax_m2"])
def test_every_plan_comes_back(registry, family, hardware):
    numbers = {"cpu": {}, "hopper": {"dtype": "bf16"}, "gb10": {"dtype": "bf16"}}[hardware]
    asked = read_settings(
        {**SIZES, "model": str(TINY / family), "hardware": hardware, "transcode": "bf16", **numbers}, {}
    )
    machine = choose_machine(registry, hardware)
    model = open_model(registry, asked, lambda *progress: None)
    plan = make_plan(model, machine, asked)
    model.checkpoint.close()
    tables = tabled(plan)
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(tables), type=Tables)
    assert data == tables
    own = model.own.of([each.name for each in machine.chain])
    back = planned(data, machine, model.own.ops, own)
    assert tabled(back) == tables
    known = {id(each) for each in (*own, *machine.implementations)}
    for kept, made in zip(back.buckets, plan.buckets, strict=True):
        for segment, other in zip(kept.segments, made.segments, strict=True):
            for step, wanted in zip(segment.steps, other.steps, strict=True):
                assert step.implementation is wanted.implementation
                assert id(step.implementation) in known
                assert (step.node.op.name, step.node.op.operands, step.node.op.attrs) == (
                    wanted.node.op.name, wanted.node.op.operands, wanted.node.op.attrs,
                )  # fmt: skip
                assert step.node.operands == wanted.node.operands
                assert (step.node.attrs, step.need, step.packings) == (wanted.node.attrs, wanted.need, wanted.packings)
                assert (step.parts, step.replaces, step.rejected) == (wanted.parts, wanted.replaces, wanted.rejected)
    assert back.program.nodes == plan.program.nodes
    assert back.choices == plan.choices
    assert back.weights == plan.weights
    assert all(np.array_equal(back.program.constants[name], array) for name, array in plan.program.constants.items())


@pytest.fixture
def kept(model, registry, tmp_path):
    """(folder, what was begun with there, plugins as kept), without building anything."""
    folder = tmp_path / "starts"
    Start(folder, registry, model)
    known = kept_registry(folder)
    begun = starts.Begun(known, read_settings({"model": str(model), **SIZES}, {}), 0)
    assert starts.find(folder, begun) is not None
    return folder, begun


def test_whatever_a_start_depends_on_is_noticed(kept, model, monkeypatch, tmp_path):
    folder, begun = kept

    def asked(**changed):
        return replace(begun, settings=read_settings({"model": str(model), **SIZES, **changed}, {}))

    assert starts.find(folder, asked(max_seq_len="16")) is None
    assert starts.find(folder, asked(numerics="fast")) is None
    shutil.copytree(model, tmp_path / "other")
    assert starts.find(folder, asked(model=str(tmp_path / "other"))) is None
    assert starts.find(folder, replace(begun, registry=discover())) is None
    other = replace(begun.registry.known, digest="of others")
    assert starts.find(folder, replace(begun, registry=replace(begun.registry, known=other))) is None
    with monkeypatch.context() as patched:
        patched.setattr(marks, "processor", lambda: "another")
        assert starts.find(folder, begun) is None
    with monkeypatch.context() as patched:
        patched.setattr("atlas_plugin_cpu.machine.runs", lambda arch: Verdict.no("it is another one"))
        assert starts.find(folder, begun) is None
    assert starts.find(folder, begun) is not None
    for change in ("time", "size", "another", "inode"):
        config = model / "config.json"
        before, stat = config.read_bytes(), config.stat()
        if change == "time":
            os.utime(config, ns=(LONG_AGO, LONG_AGO + 1))
        elif change == "size":
            config.write_bytes(before + b"\n")
        elif change == "another":
            (model / "more.json").write_bytes(b"{}")
        else:
            (tmp_path / "new").write_bytes(before)
            (tmp_path / "new").replace(config)
        os.utime(config, ns=(stat.st_atime_ns, stat.st_mtime_ns + (change == "time")))
        assert starts.find(folder, begun) is None, change
        (model / "more.json").unlink(missing_ok=True)
        config.write_bytes(before)
        os.utime(config, ns=(LONG_AGO, LONG_AGO))
        if change == "inode":
            break
        assert starts.find(folder, begun) is not None, change


def test_probes_are_asked_again(registry, model, tmp_path, monkeypatch):
    asked = read_settings({"model": str(model), **SIZES}, {})
    asked = replace(asked, hardware=None)
    folder = tmp_path / "starts"
    machine = choose_machine(registry, None)
    found = open_model(registry, asked, lambda *progress: None)
    plan = make_plan(found, machine, asked)
    library = engine.library_of(machine, found)
    backend = engine.open_backend(machine, library, plan.settings)
    begun = starts.Begun(registry, asked, registry.began)
    assert starts.keep(folder, begun, starts.Made(machine, found, plan, None, library))
    backend.close()
    found.checkpoint.close()
    begun = replace(begun, registry=kept_registry(folder))
    said = {candidate.name: candidate.verdict for candidate in machine.candidates}
    monkeypatch.setattr(starts, "probed", lambda registry, names: {name: said[name] for name in names})
    assert starts.find(folder, begun) is not None
    said["hopper"] = Verdict.yes(5, "it was put in")
    assert starts.find(folder, begun) is None


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A distribution of one plugin on the path, older than anything."""
    place = tmp_path / "site"
    (place / "toy_kept").mkdir(parents=True)
    info = place / "toy_kept-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: toy-kept\nVersion: 1.0\n\n")
    (info / "entry_points.txt").write_text("[atlas.dialects]\ntoy_kept = toy_kept.plugin:plugin\n")
    (place / "toy_kept/__init__.py").write_text("")
    (place / "toy_kept/plugin.py").write_text(
        "from atlas_core.contracts.declarations import DialectDecl\nfrom atlas_core.hookspecs import hookimpl\n"
        "class Toy:\n    @hookimpl\n    def atlas_dialect(self):\n        return DialectDecl('toy_kept', 'toy_kept.dialect:Toy')\n"
        "plugin = Toy()\n"
    )
    for path in (*place.rglob("*"), place):
        os.utime(path, ns=(LONG_AGO, LONG_AGO))
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_kept"]:
        del sys.modules[name]


def test_whatever_is_installed_is_noticed(toy, tmp_path, monkeypatch):
    folder = tmp_path / "starts"
    assert installed.keep(folder, discover())
    assert "toy_kept" in kept_registry(folder).dialects
    monkeypatch.setenv("ATLAS_PLUGINS", "toy_kept")
    assert installed.find(folder) is None
    monkeypatch.delenv("ATLAS_PLUGINS")
    os.utime(toy / "toy_kept/plugin.py", ns=(LONG_AGO, LONG_AGO + 5))
    assert installed.find(folder) is None
    os.utime(toy / "toy_kept/plugin.py", ns=(LONG_AGO, LONG_AGO))
    kept_registry(folder)
    (toy / "toy_kept/more.py").write_text("")
    assert installed.find(folder) is None
    (toy / "toy_kept/more.py").unlink()
    kept_registry(folder)
    (toy / "new-1.0.dist-info").mkdir()
    assert installed.find(folder) is None
    (toy / "new-1.0.dist-info").rmdir()
    kept_registry(folder)
    (toy / "atlas_core.py").write_text("# would be imported in place of the package")
    assert installed.find(folder) is None
    (toy / "atlas_core.py").unlink()
    (toy / "toy_kept-1.0.dist-info").rename(toy / "toy_kept-1.1.dist-info")
    assert installed.find(folder) is None
    (toy / "toy_kept-1.1.dist-info").rename(toy / "toy_kept-1.0.dist-info")
    kept_registry(folder)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "version", "4.0")
        assert installed.find(folder) is None
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", [*sys.path, str(tmp_path)])
        assert installed.find(folder) is None


def test_what_is_new_or_broken_is_not_kept(toy, tmp_path):
    folder = tmp_path / "starts"
    found = discover()
    os.utime(toy / "toy_kept/plugin.py")
    assert installed.keep(folder, found) == ""  # perhaps it was changed after it was imported
    os.utime(toy / "toy_kept/plugin.py", ns=(LONG_AGO, LONG_AGO))
    assert installed.keep(folder, replace(found, began=0)) == ""
    (toy / "toy_kept-1.0.dist-info/entry_points.txt").write_text("[atlas.dialects]\ntoy_kept = toy_kept.lost:plugin\n")
    assert installed.keep(folder, replace(discover(), began=found.began + 10**12)) == ""
    assert installed.find(folder) is None


@settings(max_examples=100)
@given(st.binary(max_size=60), st.data())
def test_a_file_is_whole_or_not_there(tmp_path_factory, content, data):
    path = tmp_path_factory.mktemp("kept") / "some.start"
    file.write(path, content)
    assert file.read(path) == content
    whole = path.read_bytes()
    change = data.draw(st.sampled_from(["cut", "longer", "flipped", "other"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = {
        "cut": whole[:at],
        "longer": whole + b"\0",
        "flipped": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        "other": data.draw(st.binary(max_size=60)),
    }[change]
    path.write_bytes(changed)
    assert file.read(path) is None


@pytest.mark.parametrize("how", ["others may write", "link", "folder", "pipe", "another's"])
def test_a_file_of_somebody_elses_is_not_read(tmp_path, monkeypatch, how):
    path, real = tmp_path / "some.start", tmp_path / "real"
    file.write(real, b"content")
    if how == "link":
        path.symlink_to(real)
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    else:
        real.rename(path)
        assert file.read(path) == b"content"
    if how == "others may write":
        path.chmod(0o620)
    if how == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert file.read(path) is None


@settings(max_examples=40)
@given(st.data())
def test_whole_nonsense_is_no_start(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("kept")
    (folder / "m").write_bytes(b"")
    known = replace(_REGISTRY, known=installed.Known("", ()))
    begun = starts.Begun(known, read_settings({"model": str(folder / "m"), "hardware": "cpu"}, {}), 0)
    nonsense = st.recursive(st.integers(-(2**63), 2**63) | st.text() | st.none() | st.binary(), st.lists)
    content = msgspec.msgpack.encode(data.draw(nonsense)) if data.draw(st.booleans()) else data.draw(st.binary())
    file.write(starts._place(folder, begun.settings), content)
    file.write(installed.place(folder), content)
    assert starts.find(folder, begun) is None
    assert installed.find(folder) is None


_REGISTRY = discover()


def test_the_oldest_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "_MOST_FILES", 3)
    for number in range(5):
        file.write(tmp_path / f"{number}.start", b"")
        os.utime(tmp_path / f"{number}.start", ns=(number, number))
    file.write(tmp_path / "a.installed", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.start", "3.start", "4.start", "a.installed"]


def test_starts_side_by_side_leave_one_whole_file(tmp_path):
    path = tmp_path / "some.start"
    contents = [bytes([number]) * 100_000 for number in range(8)]

    def write(content):
        for _ in range(10):
            file.write(path, content)
            assert file.read(path) in contents

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read(path) in contents
    assert [each.name for each in tmp_path.iterdir()] == ["some.start"]


def test_a_folder_that_cannot_be_written_is_a_warning(model, registry, tmp_path, caplog):
    (tmp_path / "full").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "atlas.start"):
        start = Start(tmp_path / "full", registry, model)
    assert not start.taken
    assert "cannot be kept" in caplog.text
    assert "--start-cache none" in caplog.text


def test_kernels_that_were_not_kept_are_looked_up(kept):
    folder, begun = kept
    found = starts.find(folder, begun)
    machine = found.machine()
    model = found.model()
    library = found.library(machine)
    assert library.target == engine.library_of(machine, model).target
    backend = engine.open_backend(machine, library, begun.settings)
    known = {kernel.module for kernel in library.found()}
    module = next(name for name, _ in library.modules() if name not in known)
    entry = next(unit for unit in machine.tree.units("cpu") if unit.module == module).entries[0].name
    assert library.find(module, entry).module == module
    assert library.stale() == {}
    backend.close()
    model.checkpoint.close()
