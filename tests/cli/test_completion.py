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
    return told.splitlines()


def test_commands_flags_and_models_are_completed(clean_environment):
    assert complete(clean_environment, "atlas ") == [f"plain,{name}" for name in COMMANDS]
    assert complete(clean_environment, "atlas ch") == ["plain,chat"]
    assert complete(clean_environment, "atlas --v") == ["plain,--version"]
    assert complete(clean_environment, "atlas serve --max-b") == ["plain,--max-batch-size", "plain,--max-body"]
    assert complete(clean_environment, "atlas kernels li") == ["plain,lint", "plain,list"]
    assert complete(clean_environment, "atlas serve smol") == ["plain,smollm2", "file,smol"]
