"""Options of other servers: the advice names what there is, and no option of ours is taken for a stranger's."""

import re

import pytest

from atlas_core.cli.elsewhere import ELSEWHERE, advice
from atlas_core.cli.main import main
from atlas_core.settings import OPTIONS

FLAGS = {f"--{name.replace('_', '-')}" for name in OPTIONS if name != "model"} | {
    a for o in OPTIONS.values() for a in o.aliases
}


FLAGS |= {f"--no-{name.replace('_', '-')}" for name, option in OPTIONS.items() if option.kind.switch and option.default}


def test_what_is_advised_exists():
    advised = {flag for text in ELSEWHERE.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert len(advised) >= 6
    assert advised <= FLAGS
    assert not FLAGS & ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("arguments", "error", "cure"),
    [
        (["serve", "--model", "x"], "atlas serve has no option --model", "name the model as the first argument: atlas serve MODEL"),
        (["serve", "x", "--max_model_len=9"], "atlas serve has no option --max_model_len", "use --max-seq-len"),
        (
            ["serve", "x", "--max-seqlen", "9"],
            "atlas serve has no option --max-seqlen",
            "did you mean --max-seq-len? atlas serve --help lists what there is",
        ),
        (["serve", "x", "--frob"], "atlas serve has no option --frob", "atlas serve --help lists what there is"),
        (["serv"], "there is no command 'serv': did you mean serve?", "atlas --help lists what there is"),
    ],
)  # fmt: skip
def test_a_mistyped_word_gets_its_cure(capsys, arguments, error, cure):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {error}\n  cure: {cure}\n"


def test_a_flag_that_nobody_has():
    assert advice("--frob") is None
