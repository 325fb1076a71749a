"""The pages for operators say what the code says; the examples of the Python API run."""

import re
from pathlib import Path

import click
import pytest

from atlas_core.cli.commands import COMMANDS
from atlas_core.cli.exits import EXIT_CODES, INTERRUPTED
from atlas_core.cli.main import atlas
from atlas_core.llm import Result
from atlas_core.settings import OPTIONS
from atlas_core.settings.options import OTHER_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "tiny" / "llama"
OPERATING = (ROOT / "docs" / "operating.md").read_text()
PYTHON = (ROOT / "docs" / "python-api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PYTHON, re.MULTILINE | re.DOTALL)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def options_table() -> str:
    lines = ["| option | value | default | |", "|---|---|---|---|"]
    for section in dict.fromkeys(option.section for option in OPTIONS.values()):
        lines.append(f"| **{section}** | | | |")
        for option in OPTIONS.values():
            if option.section == section:
                names = ", ".join(f"`{name}`" for name in (option.flag, *option.aliases))
                value = "" if option.kind.metavar == "MODEL" else f"`{cell(option.kind.metavar)}`"
                default = f"`{option.default}`" if option.default not in (None, ()) else option.unset
                lines.append(f"| {names} | {value} | {default} | {cell(option.help)} |")
    return "\n".join(lines)


def other_table() -> str:
    lines = ["| variable | |", "|---|---|", *(f"| `{name}` | {about} |" for name, about in OTHER_VARIABLES.items())]
    return "\n".join(lines)


def exits_table() -> str:
    told = [(0, "success"), *((code, f"`{kind.__name__}`: {about(kind)}") for kind, code in EXIT_CODES.items())]
    told.append((INTERRUPTED, "Ctrl-C"))
    return "\n".join(["| exit code | |", "|---|---|", *(f"| {code} | {text} |" for code, text in told)])


def about(kind: type) -> str:
    """The first clause of an error's own description."""
    text = " ".join((kind.__doc__ or "").split())
    return re.split(r"[.;:]", text, maxsplit=1)[0]


@pytest.mark.parametrize("table", [options_table, other_table, exits_table])
def test_the_tables_are_those_of_the_code(table):
    assert table() in OPERATING, f"put this into docs/operating.md:\n{table()}"


def test_every_command_is_on_the_page():
    assert [name for name in COMMANDS if f"`atlas {name}" not in OPERATING] == []


def test_every_metric_is_on_the_page():
    source = (ROOT / "atlas_core" / "src" / "atlas_core" / "server" / "metrics.py").read_text()
    names = re.findall(r'"(atlas_\w+)"', source)
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"`{name}(_total)?`", OPERATING)] == []
    known = {each for name in names for each in (name, f"{name}_total")}
    assert [name for name in re.findall(r"`(atlas_\w+)`", OPERATING) if name not in known] == []


def test_every_field_of_a_result_is_on_the_page():
    assert [name for name in Result.__struct_fields__ if f"| `{name}` |" not in PYTHON] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(example, capsys):
    exec(compile(example.replace('"smollm2"', f'"{TINY}", hardware="cpu"'), "docs/python-api.md", "exec"), {})
    if "print" in example:
        assert capsys.readouterr().out.strip()


def flags_of(command: click.Command) -> set[str]:
    own = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    if isinstance(command, click.Group):
        names = command.list_commands(click.Context(command))
        own |= {flag for name in names for flag in flags_of(command.get_command(click.Context(command), name))}
    return own


def test_every_flag_that_is_spoken_of_exists():
    """On the pages for users, and in what programs say: a cure that names a flag must not need a cure itself."""
    known = {"--help", "--version", *flags_of(atlas)} | {"--build"}  # the last is a script's, named in the line before
    strangers = (
        "cli/elsewhere.py",
        "loading/wheel.py",
        "engine/child.py",
        "engine/process.py",
    )  # other programs' flags
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/examples/*/README.md")]
    files += [*ROOT.glob("*/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    wrong = {
        f"{path.relative_to(ROOT)}: {flag}"
        for path in files
        if path.name != "measured-facts.md" and not path.as_posix().endswith(strangers)
        for line in path.read_text(encoding="utf-8").splitlines()
        if ".py" not in line and "merge" not in line
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]\b", line)
        if flag not in known and not any(each.startswith(f"{flag}-") for each in known)
    }
    assert wrong == set()
