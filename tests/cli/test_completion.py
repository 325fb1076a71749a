import subprocess
import sys

import pytest

from atlas_core.cli.commands import COMMANDS
from atlas_core.cli.completion import VARIABLE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script_that_asks_atlas(atlas, shell):
    said = atlas("completion", shell)
    assert said.code == 0, said.err
    assert f"{VARIABLE}={shell}_complete" in said.out


def test_a_shell_that_is_not_known(atlas):
    atlas("completion", "cmd").expect(2, "'cmd' is not one of 'bash', 'zsh', 'fish'")


def complete(clean_environment, words):
    variables = {
        **clean_environment,
        VARIABLE: "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    script = "import sys; from atlas_core.cli.main import main; sys.exit(main([]))"
    told = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True
    ).stdout
    return [line.partition(",")[2] for line in told.splitlines()]


def test_commands_and_flags_are_completed(clean_environment):
    assert complete(clean_environment, "atlas ") == list(COMMANDS)
    assert complete(clean_environment, "atlas ch") == ["chat"]
    assert complete(clean_environment, "atlas serve --max-b") == ["--max-batch-size", "--max-body"]
    assert complete(clean_environment, "atlas kernels li") == ["lint", "list"]
