"""The pages for operators say what the code says; the examples of the Python API run."""

import re
from pathlib import Path

import pytest

from atlas_core.cli.commands import COMMANDS
from atlas_core.cli.exits import EXIT_CODES, INTERRUPTED
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
