import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import atlas_core.cli
from atlas_core import __version__
from atlas_core.cli import main as module
from atlas_core.cli.commands import COMMANDS, Entry
from atlas_core.cli.exits import EXIT_CODES, exit_code
from atlas_core.cli.main import main
from atlas_core.plugins import GROUPS
from atlas_core.vocab import errors

INFRASTRUCTURE = {"commands", "console", "elsewhere", "exits", "main", "options"}


@pytest.fixture
def toy(monkeypatch):
    """``toy(function)`` makes ``atlas toy`` call it."""

    def put(function):
        command = function if isinstance(function, click.Command) else click.command("toy")(function)
        monkeypatch.setattr(module, "toy", command, raising=False)
        monkeypatch.setattr(module, "COMMANDS", {"toy": Entry(module.__name__, "toy", "Play.", "Toys")})

    return put


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"atlas, version {__version__}\n"
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"{name} " in told
        assert entry.summary in told


def test_help_imports_no_subcommand_and_nothing_heavy():
    script = "import sys; from atlas_core.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr.split()
    heavy = {entry.module for entry in COMMANDS.values()} | {
        "numpy",
        "starlette",
        "pluggy",
        "importlib.metadata",
        "jinja2",
    }
    assert not heavy & set(loaded)


def test_without_arguments_help_is_an_error(capsys):
    assert main([]) == 2
    assert "Usage: atlas" in capsys.readouterr().err


def test_a_misspelt_command_is_a_usage_error_with_a_cure(capsys):
    assert main(["plugns"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: there is no command 'plugns': did you mean plugins?")
    assert "cure: atlas --help" in told


def test_a_misspelt_flag_names_the_near_one(capsys):
    assert main(["plugins", "list", "--jsn"]) == 2
    told = capsys.readouterr().err
    assert "--json" in told
    assert "atlas plugins list --help lists what there is" in told


def test_an_error_is_printed_whole_on_standard_error(toy, capsys):
    def fail():
        raise errors.CheckpointError("model.safetensors is cut", "it has 7 of 9 bytes", "fetch it again")

    toy(fail)
    assert main(["toy"]) == 5
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: model.safetensors is cut\n  why:  it has 7 of 9 bytes\n  cure: fetch it again\n"


def test_a_defect_keeps_its_traceback(toy):
    toy(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["toy"])


def test_an_interrupt_is_130(toy):
    def stop():
        raise KeyboardInterrupt

    toy(stop)
    assert main(["toy"]) == 130


def test_an_exit_code_of_a_command_is_kept(toy):
    @click.command("toy")
    @click.pass_context
    def leave(ctx):
        ctx.exit(4)

    toy(leave)
    assert main(["toy"]) == 4


def test_every_error_has_its_own_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AtlasError)]
    general = {kind for kind in kinds if kind is errors.AtlasError or errors.AtlasError in kind.__bases__}
    assert general == set(EXIT_CODES)  # a special one has the code of its general kind
    assert {exit_code(kind("what")) for kind in kinds} == set(EXIT_CODES.values())
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert not {0, 126, 127, 130} & set(EXIT_CODES.values())


def test_a_derived_error_has_the_code_of_its_base():
    class Derived(errors.KernelError):
        pass

    assert exit_code(Derived("x")) == EXIT_CODES[errors.KernelError]


def test_every_module_of_the_cli_is_a_command_and_the_other_way_round():
    modules = {info.name for info in pkgutil.iter_modules(atlas_core.cli.__path__)} - INFRASTRUCTURE
    assert modules == {entry.module.rpartition(".")[2] for entry in COMMANDS.values()}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says(name):
    entry = COMMANDS[name]
    command = getattr(importlib.import_module(entry.module), entry.attribute)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.get_short_help_str(limit=200).rstrip(".") == entry.summary.rstrip(".")


def test_plugins_list_as_json(capsys):
    assert main(["plugins", "list", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["group"] for record in records} <= set(GROUPS)
    (plain,) = [record for record in records if (record["group"], record["key"]) == ("atlas.quant_formats", "plain")]
    assert (plain["dist"], plain["version"], plain["status"]) == ("atlas-core", __version__, "ok")
    assert plain["declares"] == [{"kind": "QuantFormatDecl", "key": "plain"}]


def test_plugins_list_as_text(capsys, monkeypatch):
    monkeypatch.setenv("ATLAS_PLUGINS", "")
    monkeypatch.setenv("ATLAS_TRACE_PLUGINS", "1")
    assert main(["plugins", "list"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].split() == ["GROUP", "KEY", "STATUS", "DISTRIBUTION", "VERSION", "DECLARES", "MS"]
    (plain,) = [line.split() for line in lines if line.startswith("atlas.quant_formats  plain")]
    assert plain[2:6] == ["ok", "atlas-core", __version__, "QuantFormat:plain"]
    assert "plugins: atlas-core:plain: asking atlas_quant_format" in told.err


@pytest.mark.parametrize(
    ("variable", "value", "code", "told"),
    [("ATLAS_TRACE_PLUGINS", "yes", 2, "set it to 1 or 0"), ("ATLAS_PLUGINS", "nowhere", 3, "names 'nowhere'")],
)
def test_a_bad_variable_is_an_error(monkeypatch, capsys, variable, value, code, told):
    monkeypatch.setenv(variable, value)
    assert main(["plugins", "list"]) == code
    assert told in capsys.readouterr().err


def test_two_owners_are_shown_and_are_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    for dist in ("toy_one", "toy_two"):
        (tmp_path / f"{dist}.py").write_text(
            "from atlas_core.contracts.declarations import DialectDecl\nfrom atlas_core.hookspecs import hookimpl\n"
            "class Plugin:\n    @hookimpl\n    def atlas_dialect(self):\n        return DialectDecl('clash', 'a:b')\n"
            "plugin = Plugin()\n"
        )
        info = tmp_path / f"{dist}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist.replace('_', '-')}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[atlas.dialects]\nclash = {dist}:plugin\n")
    assert main(["plugins", "list"]) == 3
    told = capsys.readouterr()
    assert told.out.count("clash") == 4
    assert "'clash': toy-one and toy-two" in told.err


def test_explain_tells_the_dialects_and_why(atlas):
    said = atlas(
        "explain", Path(__file__).parents[1] / "data" / "tiny" / "llama", "--hw", "cpu", "--tool-call-parser", "mistral"
    )
    assert said.code == 0, said.err
    assert "dialect    calls: mistral, from --tool-call-parser" in said.out
    assert "dialect    thoughts: think, from the chat template" in said.out
    assert "not seed_think: the template has no <seed:think>" in said.out
