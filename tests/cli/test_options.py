import click
import pytest
from click.testing import CliRunner

from atlas_core.cli.options import SectionedCommand, settings_from, settings_options
from atlas_core.settings import OPTIONS, Settings
from atlas_core.vocab.errors import UsageError


def run(*arguments: str, names: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> Settings:
    found: list[Settings] = []

    @click.command(cls=SectionedCommand)
    @settings_options(*names)
    def command(**params):
        found.append(settings_from(params, environ or {}))

    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_flags_become_settings():
    settings = run("toy/model", "--port", "7", "--api-key", "a,b", "--api-key", "c", "--hw", "cpu")
    assert (settings.model, settings.port, settings.api_key, settings.hardware) == ("toy/model", 7, ("a,b", "c"), "cpu")
    assert str(settings.source("model")) == "MODEL"
    assert str(settings.source("hardware")) == "--hardware"
    assert str(settings.source("bind")) == "built-in"


def test_a_command_may_take_a_few_options_only():
    assert run("m", "--hw", "cpu", names=("hardware",)).hardware == "cpu"
    with pytest.raises(AssertionError, match="No such option"):
        run("m", "--port", "7", names=("hardware",))


def test_the_file_is_named_by_flag_or_variable(tmp_path):
    file = tmp_path / "toy.toml"
    file.write_text("port = 9\n")
    assert run("m", "--config", str(file)).port == 9
    settings = run("m", environ={"ATLAS_CONFIG": str(file)})
    assert str(settings.source("port")) == f"{file}: port"


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path, content):
    file = tmp_path / "toy.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=r"toy.toml cannot be read"):
        settings_from({"config": str(file)}, {})


def test_help_shows_every_option_in_its_section_with_default_and_variable():
    @click.command(cls=SectionedCommand)
    @settings_options()
    def command(**params):
        pass

    told = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    for option in OPTIONS.values():
        assert f"\n{option.section}:\n" in told
        if option.name != "model":
            assert option.flag in told
            assert f"[{option.variable};" in told
    assert "[ATLAS_PORT; default 8888]" in told
    assert "default: the best that is present" in told
